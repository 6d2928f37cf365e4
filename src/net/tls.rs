//! The TLS parts that identities and QUIC share: one crypto provider, and one set of rules for
//! certificates.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::crypto::CryptoProvider;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::time_provider::TimeProvider;
use rustls::{Error, RootCertStore};
use rustls_pki_types::{CertificateDer, UnixTime};

/// The DNS name that every node's certificate carries and that every client requests.
///
/// A node is identified by the URI in its certificate, not by the host it runs on. The WebPKI rules
/// still require a DNS name, so all nodes have the same one. Clients' certificates have none and
/// can therefore never serve.
pub(super) const SERVER_NAME: &str = "rapidraid.node";

/// Returns the crypto provider, aws-lc-rs. It is always named explicitly, because rustls refuses to
/// choose when the build has a second provider.
pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// The clock for the dates of certificates: the machine's clock, but never earlier than the start of
/// the process's own certificate. A machine whose clock was reset to 1970 or 2000 would otherwise
/// refuse every other member.
#[derive(Debug)]
pub(super) struct CertificateClock {
    /// The first moment at which both certificates of this process's identity are valid.
    pub valid_from: UnixTime,
}

impl TimeProvider for CertificateClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::now().max(self.valid_from))
    }
}

fn roots(authority: &CertificateDer<'static>) -> Result<Arc<RootCertStore>, Error> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone())?;
    Ok(Arc::new(roots))
}

/// Returns a verifier that accepts clients with a certificate from `authority`. A client without a
/// certificate is refused.
pub(super) fn client_verifier(
    authority: &CertificateDer<'static>,
) -> Result<Arc<dyn ClientCertVerifier>, Error> {
    WebPkiClientVerifier::builder_with_provider(roots(authority)?, provider())
        .build()
        .map_err(|error| Error::General(error.to_string()))
}

/// Returns a verifier that accepts servers with a certificate from `authority`.
pub(super) fn server_verifier(
    authority: &CertificateDer<'static>,
) -> Result<Arc<WebPkiServerVerifier>, Error> {
    WebPkiServerVerifier::builder_with_provider(roots(authority)?, provider())
        .build()
        .map_err(|error| Error::General(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_clock_before_the_own_certificate_counts_as_its_first_moment() {
        let now = UnixTime::now();
        let at = |seconds| UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let (past, future) = (at(0), at(now.as_secs() + 1_000_000));
        let time = |valid_from| CertificateClock { valid_from }.current_time().unwrap();
        assert_eq!(time(future), future);
        assert!(time(past) >= now);
    }
}

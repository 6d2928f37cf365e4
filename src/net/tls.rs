//! The few TLS pieces that identities and QUIC share: one provider, one set of rules for certificates.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::crypto::CryptoProvider;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{Error, RootCertStore};
use rustls_pki_types::CertificateDer;

/// The DNS name that every node's certificate carries and every client asks for.
///
/// Nodes are known by the URI in their certificate, not by the host that they run on. The WebPKI rules
/// want a DNS name all the same, so there is one for all nodes; clients' certificates have none and can
/// therefore never serve.
pub(super) const SERVER_NAME: &str = "rapidraid.node";

/// aws-lc-rs, always named: with a second provider in the build rustls would refuse to guess.
pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

fn roots(authority: &CertificateDer<'static>) -> Result<Arc<RootCertStore>, Error> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone())?;
    Ok(Arc::new(roots))
}

/// Accepts clients that `authority` vouches for; a client without a certificate is refused.
pub(super) fn client_verifier(
    authority: &CertificateDer<'static>,
) -> Result<Arc<dyn ClientCertVerifier>, Error> {
    WebPkiClientVerifier::builder_with_provider(roots(authority)?, provider())
        .build()
        .map_err(|error| Error::General(error.to_string()))
}

/// Accepts servers that `authority` vouches for.
pub(super) fn server_verifier(
    authority: &CertificateDer<'static>,
) -> Result<Arc<WebPkiServerVerifier>, Error> {
    WebPkiServerVerifier::builder_with_provider(roots(authority)?, provider())
        .build()
        .map_err(|error| Error::General(error.to_string()))
}

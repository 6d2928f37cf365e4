//! The TLS configuration for QUIC: version 1.3, certificates of the cluster on both sides, and one
//! application protocol.

use std::sync::Arc;

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::client::Resumption;
use rustls::server::NoServerSessionStorage;
use rustls::version::TLS13;

use super::super::NetError;
use super::super::identity::{Identity, IdentityError};
use super::super::tls;

/// The application protocol and its version. A peer with another one is refused in the handshake.
pub const ALPN: &[u8] = b"rapidraid/1";

fn unusable(error: impl std::fmt::Display) -> NetError {
    IdentityError::NotIssued { reason: error.to_string() }.into()
}

/// Returns the TLS configuration of the accepting side. Neither side resumes sessions, so that
/// every connection verifies both certificates.
pub(super) fn server_crypto(identity: &Identity) -> Result<Arc<QuicServerConfig>, NetError> {
    let verifier = tls::client_verifier(identity.authority()).map_err(unusable)?;
    let clock = identity.certificate_clock();
    let mut config = rustls::ServerConfig::builder_with_details(tls::provider(), clock)
        .with_protocol_versions(&[&TLS13])
        .map_err(unusable)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![identity.certificate()], identity.key())
        .map_err(unusable)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    QuicServerConfig::try_from(config).map(Arc::new).map_err(unusable)
}

/// Returns the TLS configuration of the connecting side. See [`server_crypto`].
pub(super) fn client_crypto(identity: &Identity) -> Result<Arc<QuicClientConfig>, NetError> {
    let verifier = tls::server_verifier(identity.authority()).map_err(unusable)?;
    let clock = identity.certificate_clock();
    let mut config = rustls::ClientConfig::builder_with_details(tls::provider(), clock)
        .with_protocol_versions(&[&TLS13])
        .map_err(unusable)?
        .with_webpki_verifier(verifier)
        .with_client_auth_cert(vec![identity.certificate()], identity.key())
        .map_err(unusable)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    QuicClientConfig::try_from(config).map(Arc::new).map_err(unusable)
}

//! The identity of a process, and the identity that a certificate gives to its holder. An
//! [`Authority`](super::authority::Authority) issues the certificates.
//!
//! A certificate names its holder in one URI, `rapidraid://CLUSTER/node/NAME` or
//! `rapidraid://CLUSTER/client/NAME`; the authority's own URI is `rapidraid://CLUSTER/ca`. Private
//! keys never appear in `Debug` output, errors or logs. The caller reads the files;
//! [`check_secret_file_mode`] checks that a key file is private.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::ServerCertVerifier;
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

use super::{Peer, Role, tls};
use crate::id::{ClusterId, PeerName};
use crate::kind::ErrorKind;

/// An error of a certificate, a key or a key file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// A certificate or key cannot be parsed.
    #[error("cannot parse the {what}: {reason}; copy the folder again that `cluster init` created")]
    Malformed {
        /// The part, e.g. "certificate".
        what: &'static str,
        /// The parse error.
        reason: String,
    },
    /// The certificate does not name one member of one cluster.
    #[error(
        "the certificate names {found:?}: expected one URI rapidraid://CLUSTER/node/NAME or rapidraid://CLUSTER/client/NAME"
    )]
    Name {
        /// The URIs in the certificate.
        found: String,
    },
    /// The certificate belongs to another cluster.
    #[error(
        "the certificate is of cluster {found}, not {expected}: use the folder of the right cluster"
    )]
    OtherCluster {
        /// The cluster of this process or authority.
        expected: ClusterId,
        /// The cluster that the certificate names.
        found: ClusterId,
    },
    /// The authority did not issue the certificate, or issued it for another use.
    #[error("the authority did not issue this certificate: {reason}; use files of one folder")]
    NotIssued {
        /// The error from the verification.
        reason: String,
    },
    /// The key belongs to another certificate.
    #[error("the key does not belong to the certificate: use files of one folder")]
    KeyMismatch,
    /// A client's certificate was used to serve, which only nodes may do.
    #[error("{name} has a client's certificate, and only nodes serve: use the folder of a node")]
    NotANode {
        /// The name of the client.
        name: PeerName,
    },
    /// Other users can access a file with a secret.
    #[error("users other than its owner may use {}: chmod 600 {}", path.display(), path.display())]
    SecretExposed {
        /// The file.
        path: PathBuf,
    },
    /// A key or certificate could not be created.
    #[error("cannot make the {what}: {reason}")]
    Issue {
        /// The part.
        what: &'static str,
        /// The error from the library.
        reason: String,
    },
}

impl IdentityError {
    /// Returns the kind of this failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            IdentityError::Malformed { .. } | IdentityError::NotANode { .. } => ErrorKind::Invalid,
            IdentityError::Issue { .. } => ErrorKind::Internal,
            _ => ErrorKind::Denied,
        }
    }
}

/// Checks that the group and other users have no access to a file with a secret. `mode` is its
/// `st_mode`.
///
/// # Errors
/// [`IdentityError::SecretExposed`] if they have access.
pub fn check_secret_file_mode(mode: u32, path: &Path) -> Result<(), IdentityError> {
    if mode & 0o077 == 0 {
        Ok(())
    } else {
        Err(IdentityError::SecretExposed { path: path.to_owned() })
    }
}

/// The credentials of a process: the authority's certificate, its own certificate and its key,
/// checked to belong together.
#[derive(Clone)]
pub struct Identity {
    cluster: ClusterId,
    peer: Peer,
    authority: CertificateDer<'static>,
    certificate: CertificateDer<'static>,
    key: Arc<PrivateKeyDer<'static>>,
    valid_from: UnixTime,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("cluster", &self.cluster)
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

impl Identity {
    /// Parses the identity from three PEM texts. The authority must have issued the certificate for
    /// its own cluster, and the key must belong to the certificate. Validity dates are checked at
    /// each handshake, not here.
    pub fn from_pem(ca_pem: &str, cert_pem: &str, key_pem: &str) -> Result<Self, IdentityError> {
        let authority = one_certificate("authority's certificate", ca_pem)?;
        let certificate = one_certificate("certificate", cert_pem)?;
        let parsed_authority = parse_certificate("authority's certificate", &authority)?;
        let parsed = parse_certificate("certificate", &certificate)?;
        let cluster = authority_cluster(&parsed_authority)?;
        let peer = member_of(cluster, &parsed)?;

        let start = |cert: &X509Certificate<'_>| cert.validity().not_before.timestamp();
        let valid_from = start(&parsed).max(start(&parsed_authority)).try_into().unwrap_or(0);
        let valid_from = UnixTime::since_unix_epoch(Duration::from_secs(valid_from));
        check_issued(&authority, &certificate, peer.role, valid_from)
            .map_err(|error| IdentityError::NotIssued { reason: error.to_string() })?;

        let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes())
            .map_err(|error| IdentityError::Malformed { what: "key", reason: error.to_string() })?;
        CertifiedKey::from_der(vec![certificate.clone()], key.clone_key(), &tls::provider())
            .map_err(|_| IdentityError::KeyMismatch)?;
        Ok(Self { cluster, peer, authority, certificate, key: Arc::new(key), valid_from })
    }

    /// Returns the cluster.
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// Returns the role and the name.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Returns the role.
    pub fn role(&self) -> Role {
        self.peer.role
    }

    /// Returns the name in the cluster.
    pub fn name(&self) -> &PeerName {
        &self.peer.name
    }

    /// Returns the clock against which the validity of other members' certificates is checked. It never
    /// shows a time before this process's own certificate is valid.
    pub(super) fn certificate_clock(&self) -> Arc<tls::CertificateClock> {
        Arc::new(tls::CertificateClock { valid_from: self.valid_from })
    }

    pub(super) fn authority(&self) -> &CertificateDer<'static> {
        &self.authority
    }

    pub(super) fn certificate(&self) -> CertificateDer<'static> {
        self.certificate.clone()
    }

    pub(super) fn key(&self) -> PrivateKeyDer<'static> {
        self.key.clone_key()
    }
}

/// Applies the same rules as a handshake, so that an identity that passes here also passes the
/// handshake.
fn check_issued(
    authority: &CertificateDer<'static>,
    certificate: &CertificateDer<'static>,
    role: Role,
    at: UnixTime,
) -> Result<(), rustls::Error> {
    tls::client_verifier(authority)?.verify_client_cert(certificate, &[], at)?;
    if role == Role::Node {
        let name = ServerName::try_from(tls::SERVER_NAME)
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        tls::server_verifier(authority)?.verify_server_cert(certificate, &[], &name, &[], at)?;
    }
    Ok(())
}

/// Returns the member of `cluster` that this verified certificate names.
pub(super) fn peer_of(cluster: ClusterId, der: &[u8]) -> Result<Peer, IdentityError> {
    member_of(cluster, &parse_certificate("certificate", der)?)
}

fn member_of(expected: ClusterId, cert: &X509Certificate<'_>) -> Result<Peer, IdentityError> {
    let uri = the_uri(cert)?;
    let wrong = || IdentityError::Name { found: uri.to_owned() };
    let mut parts = uri.strip_prefix("rapidraid://").ok_or_else(wrong)?.split('/');
    let (Some(cluster), Some(role), Some(name), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(wrong());
    };
    let found: ClusterId = cluster.parse().map_err(|_| wrong())?;
    let role = match role {
        "node" => Role::Node,
        "client" => Role::Client,
        _ => return Err(wrong()),
    };
    let name = name.parse().map_err(|_| wrong())?;
    if found != expected {
        return Err(IdentityError::OtherCluster { expected, found });
    }
    Ok(Peer { role, name })
}

/// Returns the cluster that an authority's certificate names.
pub(super) fn authority_cluster(cert: &X509Certificate<'_>) -> Result<ClusterId, IdentityError> {
    let uri = the_uri(cert)?;
    uri.strip_prefix("rapidraid://")
        .and_then(|rest| rest.strip_suffix("/ca"))
        .and_then(|cluster| cluster.parse().ok())
        .ok_or_else(|| IdentityError::Malformed {
            what: "authority's certificate",
            reason: format!("it names {uri:?}, expected rapidraid://CLUSTER/ca"),
        })
}

/// Returns the URI of a certificate, which must have exactly one. With two URIs, different readers
/// could see different holders.
fn the_uri<'a>(cert: &'a X509Certificate<'_>) -> Result<&'a str, IdentityError> {
    let names = cert.subject_alternative_name().ok().flatten();
    let names = names.as_ref().map_or(&[][..], |names| names.value.general_names.as_slice());
    let uris: Vec<&str> = names
        .iter()
        .filter_map(|name| if let GeneralName::URI(uri) = name { Some(*uri) } else { None })
        .collect();
    match uris.as_slice() {
        [uri] => Ok(uri),
        _ => Err(IdentityError::Name { found: uris.join(" ").chars().take(256).collect() }),
    }
}

/// Returns the certificate of a PEM text, which must have exactly one.
pub(super) fn one_certificate(
    what: &'static str,
    pem: &str,
) -> Result<CertificateDer<'static>, IdentityError> {
    let wrong = |reason: String| IdentityError::Malformed { what, reason };
    let mut found = CertificateDer::pem_slice_iter(pem.as_bytes());
    match (found.next(), found.next()) {
        (Some(Ok(der)), None) => Ok(der),
        (Some(Err(error)), _) | (_, Some(Err(error))) => Err(wrong(error.to_string())),
        (None, _) => Err(wrong("it has no certificate".into())),
        (Some(_), Some(_)) => Err(wrong("it has more than one certificate".into())),
    }
}

pub(super) fn parse_certificate<'a>(
    what: &'static str,
    der: &'a [u8],
) -> Result<X509Certificate<'a>, IdentityError> {
    let wrong = |reason: String| IdentityError::Malformed { what, reason };
    match X509Certificate::from_der(der) {
        Ok(([], cert)) => Ok(cert),
        Ok(_) => Err(wrong("bytes follow the certificate".into())),
        Err(error) => Err(wrong(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::authority::{Authority, IssuedPem};
    use super::*;

    fn name(text: &str) -> PeerName {
        text.parse().unwrap()
    }

    fn authority(byte: u8) -> Authority {
        Authority::create(ClusterId([byte; 16])).unwrap()
    }

    #[test]
    fn files_that_do_not_fit_together_are_refused() {
        let (ours, other) = (authority(1), authority(2));
        let same_cluster = authority(1);
        let (a, b) = (name("a"), name("b"));
        let (issued, second) =
            (ours.issue(Role::Node, &a).unwrap(), ours.issue(Role::Node, &b).unwrap());
        let foreign = other.issue(Role::Node, &a).unwrap();
        let forged = same_cluster.issue(Role::Node, &a).unwrap();
        let open = |cert: &IssuedPem, key: &IssuedPem| {
            Identity::from_pem(ours.cert_pem(), &cert.cert_pem, &key.key_pem).map(|_| ())
        };
        assert_eq!(open(&issued, &issued), Ok(()));
        assert_eq!(open(&issued, &second), Err(IdentityError::KeyMismatch));
        assert!(matches!(open(&foreign, &foreign), Err(IdentityError::OtherCluster { .. })));
        assert!(matches!(open(&forged, &forged), Err(IdentityError::NotIssued { .. })));
        let kept = (ours.to_pem(), other.to_pem());
        assert!(matches!(
            Authority::from_pem(&kept.0.cert_pem, &kept.1.key_pem),
            Err(IdentityError::KeyMismatch)
        ));
        assert!(matches!(open(&kept.0, &kept.0), Err(IdentityError::Name { .. })));
        let garbage = IssuedPem { cert_pem: "garbage".into(), key_pem: "garbage".into() };
        assert!(matches!(open(&garbage, &issued), Err(IdentityError::Malformed { .. })));
        assert!(matches!(open(&issued, &garbage), Err(IdentityError::Malformed { .. })));
    }

    #[test]
    fn a_certificate_names_exactly_one_member() {
        let cluster = ClusterId([1; 16]);
        let parse = |uris: &[String]| {
            let mut params = rcgen::CertificateParams::default();
            for uri in uris {
                let uri = rcgen::SanType::URI(uri.as_str().try_into().unwrap());
                params.subject_alt_names.push(uri);
            }
            let cert = params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap();
            peer_of(cluster, cert.der())
        };
        let good = format!("rapidraid://{cluster}/client/c");
        assert_eq!(
            parse(std::slice::from_ref(&good)),
            Ok(Peer { role: Role::Client, name: name("c") })
        );
        for bad in [
            vec![],
            vec![good.clone(), format!("rapidraid://{cluster}/node/n")],
            vec![format!("rapidraid://{cluster}/admin/c")],
            vec![format!("rapidraid://{cluster}/node/")],
            vec![format!("rapidraid://{cluster}/node/a/b")],
            vec![format!("rapidraid://{cluster}/ca")],
            vec![format!("https://{cluster}/node/a")],
            vec!["rapidraid:///node/a".to_owned()],
        ] {
            assert!(matches!(parse(&bad), Err(IdentityError::Name { .. })), "{bad:?}");
        }
    }

    #[test]
    fn keys_are_not_printed() {
        let ours = authority(1);
        let issued = ours.issue(Role::Node, &name("a")).unwrap();
        let identity =
            Identity::from_pem(ours.cert_pem(), &issued.cert_pem, &issued.key_pem).unwrap();
        let secret = issued.key_pem.lines().nth(1).unwrap();
        for text in [format!("{ours:?}"), format!("{issued:?}"), format!("{identity:?}")] {
            assert!(!text.contains("PRIVATE") && !text.contains(secret), "{text}");
        }
    }

    #[test]
    fn a_secret_that_others_can_read_is_refused_with_the_remedy() {
        let path = Path::new("ca/ca.key");
        assert_eq!(check_secret_file_mode(0o100_600, path), Ok(()));
        assert_eq!(check_secret_file_mode(0o100_400, path), Ok(()));
        for mode in [0o100_640, 0o100_604, 0o100_620, 0o100_644] {
            let error = check_secret_file_mode(mode, path).unwrap_err();
            assert_eq!(
                error.to_string(),
                "users other than its owner may use ca/ca.key: chmod 600 ca/ca.key"
            );
        }
    }
}

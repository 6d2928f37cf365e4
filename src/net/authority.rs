//! The authority of a cluster, and the certificates that it issues.
//!
//! All certificates are valid from 2020 to 2120, so that machines whose clocks are wrong still form
//! a cluster. A new authority is the remedy for a leaked key; expiry is not (`docs/security.md`).

use std::fmt;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData, SanType,
};

use super::identity::{IdentityError, authority_cluster, one_certificate, parse_certificate};
use super::{Role, tls};
use crate::id::{ClusterId, PeerName};

/// The years in which every certificate begins and ends to be valid, each on 1 January.
const VALID_YEARS: (i32, i32) = (2020, 2120);

/// A certificate and its private key, as PEM text.
#[derive(Clone)]
pub struct IssuedPem {
    /// The certificate, which is public.
    pub cert_pem: String,
    /// The private key. Keep it in a file with mode 0600.
    pub key_pem: String,
}

impl fmt::Debug for IssuedPem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IssuedPem").field("cert_pem", &self.cert_pem).finish_non_exhaustive()
    }
}

/// The authority of a cluster. Its owner decides which processes are members.
pub struct Authority {
    cluster: ClusterId,
    cert_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

impl Authority {
    /// Generates a new authority for `cluster`.
    pub fn create(cluster: ClusterId) -> Result<Self, IdentityError> {
        let key = KeyPair::generate().map_err(issue_error("authority's key"))?;
        let params = authority_params(cluster)?;
        let cert = params.self_signed(&key).map_err(issue_error("authority's certificate"))?;
        Ok(Self { cluster, cert_pem: cert.pem(), issuer: Issuer::new(params, key) })
    }

    /// Parses an authority that [`Authority::to_pem`] returned.
    pub fn from_pem(cert_pem: &str, key_pem: &str) -> Result<Self, IdentityError> {
        let der = one_certificate("authority's certificate", cert_pem)?;
        let cert = parse_certificate("authority's certificate", &der)?;
        let cluster = authority_cluster(&cert)?;
        let key = KeyPair::from_pem(key_pem).map_err(|error| IdentityError::Malformed {
            what: "authority's key",
            reason: error.to_string(),
        })?;
        if key.subject_public_key_info() != cert.tbs_certificate.subject_pki.raw {
            return Err(IdentityError::KeyMismatch);
        }
        let issuer = Issuer::new(authority_params(cluster)?, key);
        Ok(Self { cluster, cert_pem: cert_pem.to_owned(), issuer })
    }

    /// Returns the certificate and the key, for the operator to keep.
    pub fn to_pem(&self) -> IssuedPem {
        IssuedPem { cert_pem: self.cert_pem.clone(), key_pem: self.issuer.key().serialize_pem() }
    }

    /// Returns the certificate alone. Every member of the cluster has it.
    pub fn cert_pem(&self) -> &str {
        &self.cert_pem
    }

    /// Returns the cluster.
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// Generates a key for `name` and certifies it. A node's certificate allows serving and
    /// calling, a client's only calling.
    pub fn issue(&self, role: Role, name: &PeerName) -> Result<IssuedPem, IdentityError> {
        let key = KeyPair::generate().map_err(issue_error("key"))?;
        let uri = format!("rapidraid://{}/{role}/{name}", self.cluster);
        let mut params = base_params(name.as_str(), &uri)?;
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if role == Role::Node {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
            let name = tls::SERVER_NAME.try_into().map_err(issue_error("certificate"))?;
            params.subject_alt_names.push(SanType::DnsName(name));
        }
        let cert = params.signed_by(&key, &self.issuer).map_err(issue_error("certificate"))?;
        Ok(IssuedPem { cert_pem: cert.pem(), key_pem: key.serialize_pem() })
    }
}

fn issue_error(what: &'static str) -> impl FnOnce(rcgen::Error) -> IdentityError {
    move |error| IdentityError::Issue { what, reason: error.to_string() }
}

fn base_params(common_name: &str, uri: &str) -> Result<CertificateParams, IdentityError> {
    let mut params = CertificateParams::default();
    params.not_before = rcgen::date_time_ymd(VALID_YEARS.0, 1, 1);
    params.not_after = rcgen::date_time_ymd(VALID_YEARS.1, 1, 1);
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    let uri = uri.try_into().map_err(issue_error("certificate's name"))?;
    params.subject_alt_names = vec![SanType::URI(uri)];
    Ok(params)
}

/// Returns the parameters of the authority's certificate. They depend on the cluster alone, so that
/// an authority that is read back issues under the same name.
fn authority_params(cluster: ClusterId) -> Result<CertificateParams, IdentityError> {
    let mut params =
        base_params(&format!("rapidraid {cluster}"), &format!("rapidraid://{cluster}/ca"))?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    Ok(params)
}

#[cfg(test)]
mod tests {
    use super::super::identity::Identity;
    use super::*;

    #[test]
    fn an_authority_read_back_issues_for_the_same_cluster() {
        let first = Authority::create(ClusterId([1; 16])).unwrap();
        let kept = first.to_pem();
        let again = Authority::from_pem(&kept.cert_pem, &kept.key_pem).unwrap();
        assert_eq!(again.cluster(), ClusterId([1; 16]));
        for (role, text) in [(Role::Node, "rack-1.node_7"), (Role::Client, "trainer")] {
            let name: PeerName = text.parse().unwrap();
            let issued = again.issue(role, &name).unwrap();
            let identity =
                Identity::from_pem(first.cert_pem(), &issued.cert_pem, &issued.key_pem).unwrap();
            assert_eq!((identity.cluster(), identity.role()), (ClusterId([1; 16]), role));
            assert_eq!(identity.name(), &name);
        }
    }
}

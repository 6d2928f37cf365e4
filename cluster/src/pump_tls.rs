//! TLS 1.3 over TCP with the certificates of the cluster, as a peer of QUIC.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

/// The DNS name in every node's certificate.
const SERVER_NAME: &str = "rapidraid.node";

/// Both sides of a connection.
pub struct Tls {
    acceptor: TlsAcceptor,
    connector: TlsConnector,
}

impl Tls {
    /// Reads the certificates and the key of a node.
    pub fn read(folder: &Path) -> Result<Self> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let certificate = |name: &str| {
            let path = folder.join(name);
            CertificateDer::from_pem_file(&path).with_context(|| path.display().to_string())
        };
        let key = folder.join("key.pem");
        let key = PrivateKeyDer::from_pem_file(&key).with_context(|| key.display().to_string())?;
        let mut roots = RootCertStore::empty();
        roots.add(certificate("ca.pem")?)?;
        let versions = &[&rustls::version::TLS13];
        let server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(versions)?
            .with_no_client_auth()
            .with_single_cert(vec![certificate("certificate.pem")?], key)?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let (acceptor, connector) = (Arc::new(server).into(), Arc::new(client).into());
        Ok(Self { acceptor, connector })
    }

    /// Accepts a connection: the receiving side.
    pub async fn accept(&self, stream: TcpStream) -> Result<server::TlsStream<TcpStream>> {
        Ok(self.acceptor.accept(stream).await?)
    }

    /// Opens a connection: the sending side.
    pub async fn connect(&self, stream: TcpStream) -> Result<client::TlsStream<TcpStream>> {
        Ok(self.connector.connect(ServerName::try_from(SERVER_NAME)?, stream).await?)
    }
}

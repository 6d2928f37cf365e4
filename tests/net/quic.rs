//! Tests of features that only QUIC has: certificates, sockets, datagrams. A bare quinn endpoint
//! plays hostile peers, because it sends whatever the test wants.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rapidraid::clock::{Clock, SystemClock};
use rapidraid::kind::ErrorKind;
use rapidraid::net::authority::{Authority, IssuedPem};
use rapidraid::net::identity::IdentityError;
use rapidraid::net::quic::{ALPN, QuicTransport, TransportLimits};
use rapidraid::net::{Address, NetError, Role, Transport};
use rustls::RootCertStore;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::pair::{authority, client, identity, node, node_with, over_quic};
use super::{in_time, transfer};

fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

fn pem(issued: &IssuedPem) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let cert = CertificateDer::from_pem_slice(issued.cert_pem.as_bytes()).unwrap();
    (vec![cert], PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes()).unwrap())
}

fn anchor(authority: &Authority) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.cert_pem().as_bytes()).unwrap()).unwrap();
    roots
}

/// Creates a client that trusts `authority` and shows `certificate`, if any.
fn stranger(
    authority: &Authority,
    certificate: Option<&IssuedPem>,
    alpn: &[u8],
) -> quinn::Endpoint {
    let config = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(anchor(authority));
    let mut config = match certificate.map(pem) {
        Some((chain, key)) => config.with_client_auth_cert(chain, key).unwrap(),
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    let mut endpoint = quinn::Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
    endpoint.set_default_client_config(quinn::ClientConfig::new(Arc::new(
        QuicClientConfig::try_from(config).unwrap(),
    )));
    endpoint
}

/// Connects as `stranger` and returns the error with which the node refuses it. A TLS 1.3 client
/// finishes its handshake before the server has checked its certificate, so the refusal may come
/// after the handshake.
async fn refusal(stranger: &quinn::Endpoint, addr: SocketAddr) -> quinn::ConnectionError {
    match stranger.connect(addr, "rapidraid.node").unwrap().await {
        Ok(connection) => connection.closed().await,
        Err(error) => error,
    }
}

fn alert(error: &quinn::ConnectionError) -> String {
    match error {
        quinn::ConnectionError::ConnectionClosed(close) => close.to_string(),
        other => panic!("not refused by TLS: {other}"),
    }
}

/// Asserts that the node still serves an honest client.
async fn assert_serves(node: &QuicTransport, authority: &Authority) {
    let client = client(authority, "good").await;
    let address = Address {
        host_port: node.local_addr().unwrap().to_string(),
        node: Some("a".parse().unwrap()),
    };
    let (dialled, accepted) = tokio::join!(client.connect(&address), node.accept());
    assert_eq!(dialled.unwrap().peer().to_string(), "node a");
    assert_eq!(accepted.unwrap().peer().to_string(), "client good");
}

#[tokio::test]
async fn clients_without_a_certificate_of_this_cluster_are_refused() {
    in_time(async {
        let (ours, other) = (authority(1), authority(2));
        let node = node(&ours, "a").await;
        let addr = node.local_addr().unwrap();
        let foreign = other.issue(Role::Node, &"a".parse().unwrap()).unwrap();
        for certificate in [None, Some(&foreign)] {
            let error = refusal(&stranger(&ours, certificate, ALPN), addr).await;
            assert!(alert(&error).contains("cryptographic handshake failed"), "{error}");
        }
        assert_serves(&node, &ours).await;
    })
    .await;
}

#[tokio::test]
async fn another_protocol_version_is_refused() {
    in_time(async {
        let ours = authority(1);
        let node = node(&ours, "a").await;
        let good = ours.issue(Role::Client, &"c".parse().unwrap()).unwrap();
        let old = stranger(&ours, Some(&good), b"rapidraid/0");
        let error = refusal(&old, node.local_addr().unwrap()).await;
        assert!(alert(&error).contains("error 120"), "no_application_protocol: {error}");
        assert_serves(&node, &ours).await;
    })
    .await;
}

#[tokio::test]
async fn a_client_of_another_cluster_learns_that_it_is_refused() {
    in_time(async {
        let (ours, other) = (authority(1), authority(2));
        let node = node(&ours, "a").await;
        let host_port = node.local_addr().unwrap().to_string();
        let foreign = client(&other, "c").await;
        let error = foreign.connect(&Address { host_port, node: None }).await.err().unwrap();
        assert!(matches!(error, NetError::Refused { .. }), "{error}");
        assert_serves(&node, &ours).await;
    })
    .await;
}

#[tokio::test]
async fn a_late_refusal_comes_with_the_first_use() {
    in_time(async {
        let ours = authority(1);
        // TLS accepts this peer in both directions, but it is not a member: the authority's key
        // signed its certificate for another cluster.
        let kept = ours.to_pem();
        let odd = odd_certificate(&kept);
        let node = node(&ours, "a").await;
        let error = refusal(&stranger(&ours, Some(&odd), ALPN), node.local_addr().unwrap()).await;
        let quinn::ConnectionError::ApplicationClosed(close) = error else { panic!("{error}") };
        assert_eq!(close.error_code, ErrorKind::Denied.wire_code().into());
        assert_serves(&node, &ours).await;
    })
    .await;
}

/// Creates a certificate that our authority's key signed and that names a member of another
/// cluster.
fn odd_certificate(authority: &IssuedPem) -> IssuedPem {
    let cluster = "01".repeat(16);
    let key = rcgen::KeyPair::from_pem(&authority.key_pem).unwrap();
    let mut ca = rcgen::CertificateParams::default();
    ca.distinguished_name = rcgen::DistinguishedName::new();
    ca.distinguished_name.push(rcgen::DnType::CommonName, format!("rapidraid {cluster}"));
    let mut params = rcgen::CertificateParams::default();
    let uri = format!("rapidraid://{}/client/c", "02".repeat(16));
    params.subject_alt_names = vec![rcgen::SanType::URI(uri.as_str().try_into().unwrap())];
    params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    let own = rcgen::KeyPair::generate().unwrap();
    let cert = params.signed_by(&own, &rcgen::Issuer::new(ca, key)).unwrap();
    IssuedPem { cert_pem: cert.pem(), key_pem: own.serialize_pem() }
}

/// Starts a server that shows `certificate` and requests none from clients.
fn impostor(certificate: &IssuedPem) -> quinn::Endpoint {
    let (chain, key) = pem(certificate);
    let mut config = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    config.alpn_protocols = vec![ALPN.to_vec()];
    let config = QuicServerConfig::try_from(config).unwrap();
    let config = quinn::ServerConfig::with_crypto(Arc::new(config));
    quinn::Endpoint::server(config, "127.0.0.1:0".parse().unwrap()).unwrap()
}

#[tokio::test]
async fn servers_that_are_no_node_of_this_cluster_are_refused() {
    in_time(async {
        let (ours, other) = (authority(1), authority(2));
        let name = "a".parse().unwrap();
        let own_key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["rapidraid.node".to_owned()]).unwrap();
        let self_signed = IssuedPem {
            cert_pem: params.self_signed(&own_key).unwrap().pem(),
            key_pem: own_key.serialize_pem(),
        };
        let client = client(&ours, "c").await;
        for (what, certificate) in [
            ("self-signed", self_signed),
            ("another cluster's node", other.issue(Role::Node, &name).unwrap()),
            ("a client of this cluster", ours.issue(Role::Client, &name).unwrap()),
        ] {
            let server = impostor(&certificate);
            let accepting = server.clone();
            let accepting = tokio::spawn(async move {
                if let Some(incoming) = accepting.accept().await {
                    let _ = incoming.await;
                }
            });
            let host_port = server.local_addr().unwrap().to_string();
            let error = client.connect(&Address { host_port, node: None }).await.err();
            assert!(matches!(error, Some(NetError::Refused { .. })), "{what}: {error:?}");
            accepting.await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_client_cannot_listen() {
    let identity = identity(&authority(1), Role::Client, "c");
    let any = "127.0.0.1:0".parse().unwrap();
    let limits = TransportLimits::default();
    let error = QuicTransport::listen(any, &identity, &limits, SystemClock::new()).await.err();
    let expected = IdentityError::NotANode { name: "c".parse().unwrap() };
    assert_eq!(error, Some(NetError::Identity(expected)));
}

#[tokio::test]
async fn clients_leave_room_for_nodes() {
    in_time(async {
        let ours = authority(1);
        let limits = TransportLimits { max_connections: 8, ..TransportLimits::default() };
        let node = node_with(&ours, "a", &limits).await;
        let host_port = node.local_addr().unwrap().to_string();
        let to = Address { host_port, node: Some("a".parse().unwrap()) };
        let mut clients = Vec::new();
        for name in ["c1", "c2", "c3", "c4", "c5", "c6"] {
            let client = client(&ours, name).await;
            let (dialled, accepted) = tokio::join!(client.connect(&to), node.accept());
            clients.push((client, dialled.unwrap(), accepted));
        }
        let late = client(&ours, "late").await;
        let refused = match late.connect(&to).await {
            Ok(connection) => connection.accept_uni().await.err().unwrap(),
            Err(error) => error,
        };
        assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
        assert!(refused.to_string().contains("try again later"), "{refused}");
        let other = identity(&ours, Role::Node, "b");
        let any = "127.0.0.1:0".parse().unwrap();
        let other = QuicTransport::listen(any, &other, &limits, SystemClock::new()).await.unwrap();
        let (dialled, accepted) = tokio::join!(other.connect(&to), node.accept());
        assert_eq!(dialled.unwrap().peer().to_string(), "node a");
        assert_eq!(accepted.unwrap().peer().to_string(), "node b");
    })
    .await;
}

#[tokio::test]
async fn garbage_on_the_port_hurts_nobody() {
    in_time(async {
        let ours = authority(1);
        let node = node(&ours, "a").await;
        let addr = node.local_addr().unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut noise = blake3::Hasher::new().finalize_xof();
        let mut datagram = [0; 2048];
        for len in (0..2048).step_by(7) {
            noise.fill(&mut datagram);
            // Half of the datagrams look like the first packet of a handshake.
            if len % 2 == 0 {
                datagram[..5].copy_from_slice(&[0xc3, 0, 0, 0, 1]);
            }
            socket.send_to(&datagram[..len], addr).unwrap();
        }
        assert_serves(&node, &ours).await;
    })
    .await;
}

#[tokio::test]
async fn a_port_in_use_is_named_and_free_again_after_closing() {
    in_time(async {
        let ours = authority(1);
        let first = node(&ours, "a").await;
        let addr = first.local_addr().unwrap();
        let identity = identity(&ours, Role::Node, "b");
        let limits = TransportLimits::default();
        let again = || QuicTransport::listen(addr, &identity, &limits, SystemClock::new());
        let error = again().await.err().unwrap();
        assert_eq!(error, NetError::AddrInUse { addr: addr.to_string() });
        assert!(error.to_string().contains(&addr.to_string()), "{error}");
        first.close().await;
        drop(first);
        loop {
            // The socket is closed when quinn's own task ends.
            tokio::task::yield_now().await;
            match again().await {
                Err(NetError::AddrInUse { .. }) => {}
                other => break assert!(other.is_ok()),
            }
        }
    })
    .await;
}

#[tokio::test]
async fn addresses_that_lead_nowhere_are_explained() {
    in_time(async {
        let client = client(&authority(1), "c").await;
        for (text, kind) in [
            ("no port here", ErrorKind::Unavailable),
            ("127.0.0.1", ErrorKind::Unavailable),
            ("nobody.invalid:7440", ErrorKind::Unavailable),
            ("127.0.0.1:0", ErrorKind::Unavailable),
        ] {
            let address = Address { host_port: text.into(), node: None };
            let error = client.connect(&address).await.err().unwrap();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
    })
    .await;
}

/// A clock that runs 50 times as fast as the system clock.
struct Hurried(Arc<SystemClock>);

#[async_trait]
impl Clock for Hurried {
    fn now(&self) -> Duration {
        self.0.now() * 50
    }

    async fn sleep(&self, duration: Duration) {
        self.0.sleep(duration / 50).await;
    }

    fn wall_seconds(&self) -> u64 {
        self.0.wall_seconds()
    }
}

#[tokio::test]
async fn a_silent_address_is_given_up() {
    in_time(async {
        // UDP reports no error for a silent address, so only a timeout detects it.
        let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
        let host_port = silent.local_addr().unwrap().to_string();
        let identity = identity(&authority(1), Role::Client, "c");
        let clock = Arc::new(Hurried(SystemClock::new()));
        let limits = TransportLimits::default();
        let client = QuicTransport::connect_only(&identity, &limits, clock).await.unwrap();
        let error = client.connect(&Address { host_port, node: None }).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    })
    .await;
}

#[tokio::test]
async fn a_peer_that_vanishes_is_noticed() {
    in_time(async {
        let ours = authority(1);
        let identity_a = identity(&ours, Role::Node, "a");
        let limits = TransportLimits {
            idle_timeout: Duration::from_millis(400),
            keep_alive: Duration::from_millis(100),
            ..TransportLimits::default()
        };
        // The node has its own runtime, so that it can end without closing its connections.
        let elsewhere = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let (clock, its_limits) = (SystemClock::new(), limits.clone());
        let node = elsewhere
            .spawn(async move {
                let any = "127.0.0.1:0".parse().unwrap();
                QuicTransport::listen(any, &identity_a, &its_limits, clock).await.unwrap()
            })
            .await
            .unwrap();
        let host_port = node.local_addr().unwrap().to_string();
        let identity = identity(&ours, Role::Client, "c");
        let client = QuicTransport::connect_only(&identity, &limits, SystemClock::new());
        let client = client.await.unwrap();
        let connection = client.connect(&Address { host_port, node: None }).await.unwrap();
        let mut send = connection.open_uni().await.unwrap();
        send.write(Bytes::from_static(b"hello")).await.unwrap();
        elsewhere.shutdown_background();
        connection.closed().await;
        let error = send.write(Bytes::from_static(b"?")).await.unwrap_err();
        assert!(matches!(error, NetError::Closed { code: None, .. }), "{error}");
        assert!(error.kind().is_transient());
    })
    .await;
}

#[tokio::test]
async fn a_host_with_two_addresses_is_found_on_either() {
    in_time(async {
        let ours = authority(1);
        let node = node(&ours, "a").await;
        let client = client(&ours, "c").await;
        let host_port = format!("localhost:{}", node.local_addr().unwrap().port());
        let address = Address { host_port, node: None };
        let (dialled, _accepted) = tokio::join!(client.connect(&address), node.accept());
        assert_eq!(dialled.unwrap().peer().to_string(), "node a");
    })
    .await;
}

#[tokio::test]
async fn a_transfer_with_large_datagrams_does_not_stand_still() {
    in_time(async {
        let world = over_quic().await;
        transfer(&world, 256 << 20).await;
    })
    .await;
}

/// The process of a node dies and restarts at once. The peer must notice long before the idle
/// timeout of the connection.
#[tokio::test]
async fn a_node_that_starts_anew_is_noticed_at_once() {
    in_time(async {
        let ours = authority(1);
        let (a, c) = (identity(&ours, Role::Node, "a"), identity(&ours, Role::Client, "c"));
        let idle_timeout = Duration::from_secs(3600);
        let limits = TransportLimits { idle_timeout, ..Default::default() };
        let listen = |at: SocketAddr| {
            let (a, limits) = (a.clone(), limits.clone());
            async move { QuicTransport::listen(at, &a, &limits, SystemClock::new()).await.unwrap() }
        };
        let process = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let (told, addr) = tokio::sync::oneshot::channel();
        let first = listen("127.0.0.1:0".parse().unwrap());
        process.spawn(async move {
            let node = first.await;
            told.send(node.local_addr().unwrap()).unwrap();
            let _connection = node.accept().await.unwrap();
            std::future::pending::<()>().await;
        });
        let addr = addr.await.unwrap();
        let client = QuicTransport::connect_only(&c, &limits, SystemClock::new()).await.unwrap();
        let address = Address { host_port: addr.to_string(), node: Some("a".parse().unwrap()) };
        let connection = client.connect(&address).await.unwrap();
        process.shutdown_background();
        // The socket is closed when the last task of the process has ended.
        while UdpSocket::bind(addr).is_err() {
            tokio::task::yield_now().await;
        }
        let _again = listen(addr).await;
        // The new process answers packets of the old connection by ending that connection.
        if let Ok(mut send) = connection.open_uni().await {
            let _ = send.write(Bytes::from_static(b"anybody there?")).await;
        }
        connection.closed().await;
    })
    .await;
}

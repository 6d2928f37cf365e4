//! A test world: a node `a`, a client `c`, and one connection between them, on either transport.

use std::sync::Arc;

use rapidraid::clock::SystemClock;
use rapidraid::id::ClusterId;
use rapidraid::net::authority::Authority;
use rapidraid::net::identity::Identity;
use rapidraid::net::memory::MemoryNetwork;
use rapidraid::net::quic::{QuicTransport, TransportLimits};
use rapidraid::net::{Address, Connection, Peer, Role, Transport};

pub struct World {
    pub address: Address,
    pub client_transport: Arc<dyn Transport>,
    pub node_transport: Arc<dyn Transport>,
    /// The client's end of the connection.
    pub client: Arc<dyn Connection>,
    /// The node's end of the connection.
    pub node: Arc<dyn Connection>,
}

impl World {
    async fn of(
        client_transport: Arc<dyn Transport>,
        node_transport: Arc<dyn Transport>,
        host_port: &str,
    ) -> World {
        let address = Address { host_port: host_port.into(), node: Some("a".parse().unwrap()) };
        let (client, node) =
            tokio::join!(client_transport.connect(&address), node_transport.accept());
        let (client, node) = (client.unwrap(), node.unwrap());
        World { address, client_transport, node_transport, client, node }
    }

    /// Returns the next connection that the node accepts and whose client has not rejected it.
    pub async fn accept_live(&self) -> Arc<dyn Connection> {
        loop {
            let node = self.node_transport.accept().await.unwrap();
            tokio::select! {
                biased;
                () = node.closed() => {}
                () = tokio::task::yield_now() => return node,
            }
        }
    }
}

pub async fn memory() -> World {
    let network = MemoryNetwork::new();
    let peer = |role, name: &str| Peer { role, name: name.parse().unwrap() };
    let client = network.join(peer(Role::Client, "c"), "c:0");
    let node = network.join(peer(Role::Node, "a"), "a:7440");
    World::of(Arc::new(client), Arc::new(node), "a:7440").await
}

pub fn authority(cluster: u8) -> Authority {
    Authority::create(ClusterId([cluster; 16])).unwrap()
}

pub fn identity(authority: &Authority, role: Role, name: &str) -> Identity {
    let issued = authority.issue(role, &name.parse().unwrap()).unwrap();
    Identity::from_pem(authority.cert_pem(), &issued.cert_pem, &issued.key_pem).unwrap()
}

pub async fn node(authority: &Authority, name: &str) -> QuicTransport {
    node_with(authority, name, &TransportLimits::default()).await
}

pub async fn node_with(
    authority: &Authority,
    name: &str,
    limits: &TransportLimits,
) -> QuicTransport {
    let identity = identity(authority, Role::Node, name);
    let any = "127.0.0.1:0".parse().unwrap();
    QuicTransport::listen(any, &identity, limits, SystemClock::new()).await.unwrap()
}

pub async fn client(authority: &Authority, name: &str) -> QuicTransport {
    let identity = identity(authority, Role::Client, name);
    QuicTransport::connect_only(&identity, &TransportLimits::default(), SystemClock::new())
        .await
        .unwrap()
}

pub async fn over_quic() -> World {
    let authority = authority(1);
    let (client, node) = (client(&authority, "c").await, node(&authority, "a").await);
    let host_port = node.local_addr().unwrap().to_string();
    World::of(Arc::new(client), Arc::new(node), &host_port).await
}

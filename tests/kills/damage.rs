//! Deletes data behind the daemons' backs, and lists the catalogue's keys. No command shows those
//! keys, so the call uses a node's own certificate.

use rapidraid::clock::SystemClock;
use rapidraid::net::call::Caller;
use rapidraid::net::identity::Identity;
use rapidraid::net::pool::Pool;
use rapidraid::net::quic::{QuicTransport, TransportLimits};
use rapidraid::net::{Address, Transport};
use rapidraid::wire::calls::ListKeys;
use std::sync::Arc;

use crate::fleet::{Fleet, LEASE};
use crate::machine::files_below;

/// Maximum number of keys that a call lists: more than a fleet at rest has nodes, and enough to
/// show which keys are left.
const SHOWN: u32 = 100;

impl Fleet {
    /// Simulates a disk failure of the catalogue server: kills the daemon and deletes its catalogue
    /// database.
    pub fn lose_catalogue(&self) {
        self.kill(self.home);
        self.bury(self.home);
        std::fs::remove_dir_all(self.data_folder(self.home).join("catalogue")).unwrap();
    }

    /// Kills a node's daemon, deletes one of its replicas, and starts the daemon again.
    pub fn lose_replica(&self, at: usize) {
        self.kill(at);
        self.bury(at);
        let shards = self.data_folder(at).join("shards");
        let replica = files_below(&shards).into_iter().find(|file| file.ends_with(".rep"));
        std::fs::remove_file(shards.join(replica.unwrap())).unwrap();
        self.restart(at);
    }

    /// Kills a node's daemon, and starts it again with an empty data folder.
    pub fn lose_disk(&self, at: usize) {
        self.take_down(at);
        std::fs::remove_dir_all(self.data_folder(at)).unwrap();
        self.restart(at);
        self.until("the node is back", || self.live() == self.members.len());
    }

    /// Kills a node's daemon, and waits until its lease is over.
    pub fn take_down(&self, at: usize) {
        self.kill(at);
        self.bury(at);
        self.until("its lease is over", || self.live() < self.members.len());
    }

    /// Returns keys of the catalogue that the node `home` serves, or the error message if the call
    /// fails.
    pub fn catalogue_keys(&self, home: &str) -> Result<Vec<String>, String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let folder = self.path(&format!("cluster/nodes/{home}"));
            let pem = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
            let identity =
                Identity::from_pem(&pem("ca.pem"), &pem("certificate.pem"), &pem("key.pem"))
                    .unwrap();
            let (limits, clock) = (TransportLimits::default(), SystemClock::new());
            let transport = QuicTransport::connect_only(&identity, &limits, clock.clone()).await;
            let transport: Arc<dyn Transport> = Arc::new(transport.unwrap());
            let caller = Caller::new(Pool::new(transport.clone(), clock.clone()), clock, 3 * LEASE);
            let host_port = self.members[self.place(home)].address.clone();
            let to = Address { host_port, node: Some(home.parse().unwrap()) };
            let call = ListKeys { prefix: String::new(), after: None, limit: SHOWN };
            let page = caller.call_address(&to, &call).await;
            transport.close().await;
            Ok(page.map_err(|error| error.to_string())?.into_iter().map(|(key, ..)| key).collect())
        })
    }
}

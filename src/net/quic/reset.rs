//! Stateless resets after a restart. A packet for a connection of the previous process is answered
//! by a stateless reset (RFC 9000, 10.3). The peer accepts it because its token is derived from the
//! daemon's private key, and so learns at once that the daemon has restarted.
//!
//! Without this, peers would notice the restart only after the idle timeout, and wait for answers
//! that no process will send.

use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::{CryptoError, HmacKey};
use quinn::{ConnectionId, ConnectionIdGenerator, EndpointConfig};

use super::super::identity::Identity;
use crate::entropy::{Entropy, SystemEntropy};

/// The context string for the derivation of the key of the reset tokens.
const TOKENS: &str = "rapidraid stateless reset v1";
/// Length of a connection id in bytes, as in quinn.
const ID_BYTES: usize = 8;

struct ResetKey([u8; 32]);

impl HmacKey for ResetKey {
    fn sign(&self, data: &[u8], signature_out: &mut [u8]) {
        blake3::Hasher::new_keyed(&self.0).update(data).finalize_xof().fill(signature_out);
    }

    fn signature_len(&self) -> usize {
        blake3::OUT_LEN
    }

    fn verify(&self, data: &[u8], signature: &[u8]) -> Result<(), CryptoError> {
        // blake3 compares hashes in constant time.
        let expected = blake3::keyed_hash(&self.0, data);
        let is_same = <[u8; 32]>::try_from(signature).is_ok_and(|found| expected == found);
        is_same.then_some(()).ok_or(CryptoError)
    }
}

/// A generator of random connection ids. With quinn's default ids, a process recognizes only the ids
/// that it made itself, so a restarted daemon would send no reset for the connections of its earlier
/// process.
struct AnyId;

impl ConnectionIdGenerator for AnyId {
    fn generate_cid(&mut self) -> ConnectionId {
        let mut id = [0; ID_BYTES];
        SystemEntropy.fill(&mut id);
        ConnectionId::new(&id)
    }

    fn cid_len(&self) -> usize {
        ID_BYTES
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

/// Configures the endpoint of `identity` to answer for connections of earlier processes. quinn
/// limits this to one answer per 20 ms.
pub(super) fn outlive_restarts(config: &mut EndpointConfig, identity: &Identity) {
    let key = ResetKey(blake3::derive_key(TOKENS, identity.key().secret_der()));
    config.reset_key(Arc::new(key)).cid_generator(|| Box::new(AnyId));
}

//! How peers learn at once that a daemon has started anew: what still comes for a connection of the process before it is answered by
//! a stateless reset (RFC 9000, 10.3), which they believe because its token follows from the daemon's private key.
//!
//! Without it they would notice after the idle time only, and wait for answers that nobody owes them any more.

use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::{CryptoError, HmacKey};
use quinn::{ConnectionId, ConnectionIdGenerator, EndpointConfig};

use super::super::identity::Identity;
use crate::entropy::{Entropy, SystemEntropy};

/// What the key of the tokens is derived for.
const TOKENS: &str = "rapidraid stateless reset v1";
/// Length of a connection's id, as quinn has it.
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
        // A comparison of hashes takes the same time wherever they differ.
        let expected = blake3::keyed_hash(&self.0, data);
        let is_same = <[u8; 32]>::try_from(signature).is_ok_and(|found| expected == found);
        is_same.then_some(()).ok_or(CryptoError)
    }
}

/// Ids that say nothing: quinn's own are known to the process that made them only, and it would not answer for those of another.
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

/// Has the endpoint of `identity` answer for connections of earlier processes. quinn bounds how often it does: once in 20 ms.
pub(super) fn outlive_restarts(config: &mut EndpointConfig, identity: &Identity) {
    let key = ResetKey(blake3::derive_key(TOKENS, identity.key().secret_der()));
    config.reset_key(Arc::new(key)).cid_generator(|| Box::new(AnyId));
}

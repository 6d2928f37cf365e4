//! Work on stripes as bounded streams, grouped by the actor that runs it: a client uploads; a client,
//! or a node that mends a replica, reads; a coordinator archives and repairs; and every node executes
//! its part of a plan.

pub mod busy_retry;
pub mod coordinator;
pub mod executor;
pub mod rate_limiter;
pub mod read;
pub mod record_fetch;
pub mod upload;

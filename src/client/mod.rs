//! The library that trainers and the command line use: save, restore, archive, list.
//!
//! A [`Client`] sends its requests to any live daemon of the cluster, its *gateway*, and streams
//! blocks to and from the nodes that hold them. docs/semantics.md specifies what each call promises.
//!
//! ```no_run
//! # async fn example(identity: rapidraid::net::identity::Identity) -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//! use bytes::Bytes;
//! use rapidraid::client::{Client, NewShard, SaveOptions};
//!
//! let client = Client::connect(&identity, vec!["node01.example:7440".into()]).await?;
//! let shard = NewShard { name: "rank-0".parse()?, source: Arc::new(Bytes::from_static(b"weights")) };
//! let quiet = Arc::new(|_| ());
//! client.save(&"gpt".parse()?, rapidraid::id::Step(1000), vec![shard], SaveOptions::default(), quiet).await?;
//! # Ok(()) }
//! ```

mod admin;
mod archive;
mod committed_record;
mod connection;
mod error;
mod file_source;
mod gateway;
mod node_reports;
mod repair;
mod restore;
mod save;
mod step_requests;
mod verify;

pub use admin::StatusReport;
pub use archive::ArchiveReport;
pub use connection::{Client, Progress, ProgressFn, summarize_addresses};
pub use error::ClientError;
pub use file_source::FileSource;
pub use node_reports::{CatalogueReport, NodeReport, StripeFiles};
pub use repair::RepairReport;
pub use restore::{CheckpointIndex, MemorySink, ReadRange, RestoreReport, RestoreRequest};
pub use save::{
    JointDecisions, JointWriter, NewShard, SaveCode, SaveDecisions, SaveFate, SaveOptions,
    SaveReport,
};
pub use step_requests::{CommittedStep, ShowReport};
pub use verify::{AbsentNode, Fault, HeldItem, Problem, VerifyReport};

pub use crate::pipeline::read::Sink;

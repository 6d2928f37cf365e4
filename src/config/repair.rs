//! The settings of automatic repair (docs/semantics.md, 11).

use std::time::Duration;

use super::error::ConfigError;
use super::layers::{Layers, Value};

/// The default of [`RepairRules::share_percent`].
const DEFAULT_SHARE_PERCENT: u8 = 25;
/// The default of [`RepairRules::grace`].
const DEFAULT_GRACE: Duration = Duration::from_secs(120);
/// The default share of the storage nodes that may be away together before the brake is on.
const DEFAULT_BRAKE_PERCENT: u8 = 15;

/// The rules of automatic repair, which the catalogue server applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RepairRules {
    /// The percentage of the rate of the links at which repairs send. 0: nothing is repaired
    /// automatically.
    pub share_percent: u8,
    /// The time for which a step is degraded before it is repaired, unless its repair is urgent.
    /// Also the time for which a node is away before it is given up for replicas. A node is given
    /// up for pieces after five times this time.
    pub grace: Duration,
    /// The percentage of the storage nodes, at least one node, that may be away together. The brake
    /// is on while more nodes are away, or while failure domains are affected (docs/semantics.md,
    /// 11).
    pub brake_percent: u8,
}

impl RepairRules {
    /// The rules by which nothing is repaired automatically.
    pub const OFF: RepairRules = RepairRules {
        share_percent: 0,
        grace: DEFAULT_GRACE,
        brake_percent: DEFAULT_BRAKE_PERCENT,
    };

    pub(super) fn read(layers: &Layers<'_>) -> Result<Self, ConfigError> {
        let percent =
            |value: &Value| u8::try_from(value.integer()?).ok().filter(|percent| *percent <= 100);
        let read = |key| layers.get(key, "a whole number of percent, 0 to 100", percent);
        Ok(Self {
            share_percent: read("repair.share")?.unwrap_or(DEFAULT_SHARE_PERCENT),
            grace: super::seconds(layers, "repair.grace_s", DEFAULT_GRACE)?,
            brake_percent: read("repair.brake")?.unwrap_or(DEFAULT_BRAKE_PERCENT),
        })
    }
}

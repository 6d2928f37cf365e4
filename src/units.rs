//! The lengths of grains and blocks, and the text forms of byte counts and dates.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The length of a grain in bytes. A grain is the unit of hashing, fingerprinting and verification;
/// its length is part of the format.
pub const GRAIN_BYTES: u64 = 64 * 1024;
/// The length of every padded block is a multiple of this number of bytes. Vector kernels process
/// steps of this length, so no grain of a padded block has a partial step.
pub const BLOCK_ALIGN_BYTES: u64 = 128;
/// The default length of a full block, in bytes.
pub const DEFAULT_BLOCK_BYTES: u64 = 64 * MIB;
/// The longest block that a cluster can be configured for, in bytes. The limits of the records and
/// messages about a block follow from it.
pub const MAX_BLOCK_BYTES: u64 = 128 * MIB;
/// The block lengths that [`is_block_length`] accepts, as text for error messages.
pub const BLOCK_LENGTHS: &str = "a multiple of 64KiB between \"64KiB\" and \"128MiB\"";
/// 2^10 bytes.
pub const KIB: u64 = 1 << 10;
/// 2^20 bytes.
pub const MIB: u64 = 1 << 20;

/// Returns whether a cluster can be configured for full blocks of `bytes`.
pub fn is_block_length(bytes: u64) -> bool {
    bytes.is_multiple_of(GRAIN_BYTES) && (GRAIN_BYTES..=MAX_BLOCK_BYTES).contains(&bytes)
}

/// Returns the number of grains in `bytes`. The last grain may be partial.
pub const fn grains(bytes: u64) -> u64 {
    bytes.div_ceil(GRAIN_BYTES)
}

/// Returns seconds since 1970 as `2026-11-20 09:30:00` (Howard Hinnant, "chrono-Compatible
/// Low-Level Date Algorithms": civil_from_days, for days since 1970 that are not negative).
pub fn date(seconds: u64) -> String {
    // A number beyond the year 9999 is damage, not a date.
    let seconds = seconds.min(253_402_300_799);
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

/// A byte count as people write it in a configuration: `262144`, `64KiB`, `256MiB`, `1GB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "ByteText", into = "u64")]
pub struct ByteCount(pub u64);

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number of bytes, or text such as \"64MiB\"")]
enum ByteText {
    Number(u64),
    Text(String),
}

impl TryFrom<ByteText> for ByteCount {
    type Error = ByteCountError;
    fn try_from(text: ByteText) -> Result<Self, ByteCountError> {
        match text {
            ByteText::Number(bytes) => Ok(Self(bytes)),
            ByteText::Text(text) => text.parse(),
        }
    }
}

impl From<ByteCount> for u64 {
    fn from(count: ByteCount) -> u64 {
        count.0
    }
}

/// The error for a text that is not a byte count.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a size: expected a whole number with B, KiB, MiB, GiB, TiB, KB, MB or GB behind it, e.g. \"64MiB\""
)]
pub struct ByteCountError(String);

impl FromStr for ByteCount {
    type Err = ByteCountError;
    fn from_str(text: &str) -> Result<Self, ByteCountError> {
        let wrong = || ByteCountError(text.chars().take(64).collect());
        let trimmed = text.trim();
        let digits = trimmed.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = trimmed.split_at(digits);
        let scale: u64 = match unit.trim() {
            "" | "B" => 1,
            "KiB" | "K" => 1 << 10,
            "MiB" | "M" => 1 << 20,
            "GiB" | "G" => 1 << 30,
            "TiB" | "T" => 1 << 40,
            "KB" => 1000,
            "MB" => 1_000_000,
            "GB" => 1_000_000_000,
            _ => return Err(wrong()),
        };
        let number: u64 = number.parse().map_err(|_| wrong())?;
        number.checked_mul(scale).map(Self).ok_or_else(wrong)
    }
}

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        match bytes {
            0..=1023 => write!(f, "{bytes} B"),
            1024..=1_048_575 => write!(f, "{:.1} KiB", bytes as f64 / 1024.0),
            1_048_576..=1_073_741_823 => write!(f, "{:.1} MiB", bytes as f64 / 1_048_576.0),
            _ => write!(f, "{:.2} GiB", bytes as f64 / 1_073_741_824.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_written() {
        assert_eq!("64MiB".parse(), Ok(ByteCount(64 * MIB)));
        assert_eq!("262144".parse(), Ok(ByteCount(262_144)));
        assert_eq!("1 GB".parse(), Ok(ByteCount(1_000_000_000)));
        for bad in
            ["", "MiB", "-1", "1.5MiB", "1XB", "99999999999999999999", "18446744073709551615KiB"]
        {
            assert!(bad.parse::<ByteCount>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_last_grain_may_be_partial() {
        assert_eq!([grains(0), grains(1), grains(65_536), grains(65_537)], [0, 1, 1, 2]);
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        let known = [
            (0, "1970-01-01 00:00:00"),
            (951_782_399, "2000-02-28 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_709_251_199, "2024-02-29 23:59:59"),
            (4_107_542_400, "2100-03-01 00:00:00"),
            (u64::MAX, "9999-12-31 23:59:59"),
        ];
        for (seconds, expected) in known {
            assert_eq!(date(seconds), expected);
        }
    }
}

//! Medians and ratios. A ratio compares two runs of the same round, so that a drift from round to
//! round cancels out.

use serde::{Deserialize, Serialize};

/// A median and the spread around it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The lower quartile.
    pub low: f64,
    /// The upper quartile.
    pub high: f64,
    /// The smallest value.
    pub min: f64,
    /// The greatest value.
    pub max: f64,
    /// The number of values.
    pub count: usize,
}

/// Returns the spread of the values, or `None` if there are none.
pub fn spread(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let place = share * (values.len() - 1) as f64;
        let (below, above) = (values[place.floor() as usize], values[place.ceil() as usize]);
        below + (above - below) * place.fract()
    };
    let (min, max) = (*values.first()?, *values.last()?);
    let count = values.len();
    Some(Spread { median: at(0.5), low: at(0.25), high: at(0.75), min, max, count })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_between_values() {
        let found = spread([4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((found.median, found.low, found.high), (2.5, 1.75, 3.25));
        assert_eq!((found.min, found.max, found.count), (1.0, 4.0, 4));
        assert_eq!(spread([7.0]).unwrap().median, 7.0);
        assert_eq!(spread([]), None);
    }
}

//! The Markov chain of one group: the number of its lost pieces, from 0 to n-k+1.
//!
//! Each piece is lost at the rate λ. A repair ends at the rate μ and makes all lost pieces: a
//! failure during the repair starts it again, because the group then survives fewer losses.

/// Returns the mean time until the group is lost, in the unit of the rates' inverse.
///
/// From i lost pieces another one is lost at the rate f(i) = (n-i)λ, before the repair ends with
/// probability p(i) = f(i) / (f(i) + μ). A cycle begins without a lost piece and ends with the
/// repair or with the loss of the group. It lasts 1/f(0) and, for each i >= 1 that it reaches,
/// 1 / (f(i) + μ). The group is lost in a share p(1) ... p(n-k) of the cycles, so that the mean
/// time is that of a cycle over this share. No term is a difference, so the result is exact for
/// rare losses, too.
pub fn mean_time_to_loss(n: usize, k: usize, lost_per_time: f64, repaired_per_time: f64) -> f64 {
    let (mut cycle, mut reached) = (1.0 / (n as f64 * lost_per_time), 1.0);
    for lost in 1..=n - k {
        let rate = (n - lost) as f64 * lost_per_time;
        let all = rate + repaired_per_time;
        cycle += reached / all;
        reached *= rate / all;
    }
    cycle / reached
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirror_has_the_known_mean_time() {
        // Two copies: (3λ + μ) / 2λ².
        for (lost, repaired) in [(0.01, 1.0), (1e-9, 1e3), (2.0, 0.5)] {
            let known = (3.0 * lost + repaired) / (2.0 * lost * lost);
            let found = mean_time_to_loss(2, 1, lost, repaired);
            assert!((found / known - 1.0).abs() < 1e-12, "{found} {known}");
        }
        // Without repair it is the time in which the pieces are lost one after the other.
        let none = mean_time_to_loss(3, 1, 0.01, 0.0);
        assert!((none - (1.0 / 3.0 + 1.0 / 2.0 + 1.0) / 0.01).abs() < 1e-9);
    }
}

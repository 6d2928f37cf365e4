//! The bars that the kernels must pass. Each bar is a ratio of contestants of one group, so that
//! both were measured in the same rounds. A bar whose contestant is missing (an instruction set, a
//! library, a future mode) is not measured, and then neither met nor missed.

use anyhow::Result;
use rapidraid::gf::Kernel;
use serde::{Deserialize, Serialize};

use crate::groups::{self, *};
use crate::harness::{Measured, Outcome, quartiles};
use crate::lanes::Place;

/// The bound of a measure.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// How a measure follows from samples.
enum Formula {
    /// How many times as fast the first contestant is as the second.
    Speed(String, String),
    /// The ratio of the first contestant's time to the sum of the others' times.
    Time(String, Vec<String>),
    /// Nanoseconds for each byte of work.
    PerByte(String),
    /// Contestants form pairs. The measure is the speed of the first of a pair relative to the
    /// second, in the pair where it is lowest.
    WorstPair,
    /// A count, without a measurement.
    Count(f64),
}

struct Bar {
    measure: &'static str,
    question: &'static str,
    place: Place,
    bound: Bound,
    formula: Formula,
}

/// The result of a bar.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    pub measure: String,
    /// The bar as text, such as `>= 0.95x`.
    pub bar: String,
    /// Lower quartile, median and upper quartile over rounds. None if a contestant is missing.
    pub measured: Option<[f64; 3]>,
    pub met: Option<bool>,
}

/// Compares the outcomes with all bars. Returns a verdict for each.
pub fn judge(cast: &Cast, outcomes: &[Outcome]) -> Result<Vec<Verdict>> {
    Ok(bars(cast)?.iter().map(|bar| bar.judge(outcomes)).collect())
}

impl Bar {
    fn judge(&self, outcomes: &[Outcome]) -> Verdict {
        let outcome = outcomes
            .iter()
            .find(|outcome| (outcome.question, outcome.place) == (self.question, self.place));
        let measured = match self.formula {
            Formula::Count(count) => Some([count; 3]),
            _ => outcome.and_then(|outcome| self.formula.measured(outcome)),
        };
        let unit = if matches!(self.formula, Formula::PerByte(_)) { " ns/B" } else { "x" };
        let (bar, met) = match self.bound {
            Bound::AtLeast(bound) => (format!(">= {bound}{unit}"), measured.map(|m| m[1] >= bound)),
            Bound::AtMost(bound) => (format!("<= {bound}{unit}"), measured.map(|m| m[1] <= bound)),
        };
        let measure = match self.formula {
            Formula::Count(_) => self.measure.to_owned(),
            _ => format!("{}, {}", self.measure, self.place.name()),
        };
        Verdict { measure, bar, measured, met }
    }
}

impl Formula {
    fn measured(&self, outcome: &Outcome) -> Option<[f64; 3]> {
        let find = |name: &String| outcome.contestants.iter().find(|other| other.name == *name);
        match self {
            Formula::Speed(who, than) => Some(quartiles(&find(who)?.ratios(find(than)?))),
            Formula::Time(who, parts) => {
                let parts: Option<Vec<&Measured>> = parts.iter().map(find).collect();
                let parts = parts?;
                let ratios = find(who)?.seconds.iter().enumerate().map(|(round, seconds)| {
                    seconds / parts.iter().map(|part| part.seconds[round]).sum::<f64>()
                });
                Some(quartiles(&ratios.collect::<Vec<_>>()))
            }
            Formula::PerByte(who) => {
                let seconds = quartiles(&find(who)?.seconds);
                Some(seconds.map(|seconds| 1e9 * seconds / outcome.work_bytes as f64))
            }
            Formula::WorstPair => {
                let pairs = outcome.contestants.chunks_exact(2);
                let ratios = pairs.map(|pair| quartiles(&pair[0].ratios(&pair[1])));
                ratios.min_by(|one, other| one[1].total_cmp(&other[1]))
            }
            Formula::Count(count) => Some([*count; 3]),
        }
    }
}

/// Returns all bars. Each names what it compares, so that a reader needs no other table.
fn bars(cast: &Cast) -> Result<Vec<Bar>> {
    use Bound::{AtLeast, AtMost};
    use Place::{Cache, Memory};
    let own = groups::ours(cast.kernel);
    let past = groups::ours_past_caches(cast.kernel);
    // Comparisons use the last library (`Isal::find`).
    let isal = cast.isal.last().map_or("ISA-L".to_owned(), |isal| isal.name());
    let isal_tiled = cast.isal.last().map_or("ISA-L".to_owned(), groups::tiled);
    let mut bars = Vec::new();
    let mut add = |measure, (question, place), bound, formula| {
        bars.push(Bar { measure, question, place, bound, formula });
    };
    let speed = |who: &str, than: &str| Formula::Speed(who.to_owned(), than.to_owned());

    let one = "hop with one local block against the XOR-only loop over the same streams";
    let two = "hop with two local blocks against the XOR-only loop over the same streams";
    for (measure, question) in [(one, HOP[0]), (two, HOP[1])] {
        add(measure, (question, Cache), AtLeast(0.95), speed(&own, FLOOR));
        add(measure, (question, Memory), AtLeast(0.95), speed(&past, FLOOR_PAST_CACHES));
    }
    let measure = "hop with two local blocks against ISA-L on the same shape";
    add(measure, (HOP[1], Cache), AtLeast(1.1), speed(&own, &isal));
    add(measure, (HOP[1], Memory), AtLeast(1.6), speed(&past, &isal));
    let in_place = groups::ours_in_place(cast.kernel);
    let measure = "hop written over the incoming buffer against out of place";
    add(measure, (HOP[1], Cache), AtLeast(1.15), speed(&in_place, &own));
    let measure = "hop against passes of `reed-solomon-erasure`";
    add(measure, (HOP[1], Cache), AtLeast(35.0), speed(&own, RS_ERASURE));
    let measure = "hop against passes of `reed-solomon-erasure` with its SIMD feature";
    add(measure, (HOP[1], Cache), AtLeast(3.0), speed(&own, RS_ERASURE_SIMD));
    let measure = "hop over GF(2^16) against GF(2^8)";
    add(measure, (HOP[1], Cache), AtLeast(0.95), speed(&groups::ours_wide(cast.kernel), &own));
    for (measure, name, bound) in [
        ("hop by AVX2 and GFNI against the XOR-only loop", "avx2-gfni", 0.90),
        ("hop by AVX2 shuffles against the XOR-only loop", "avx2", 0.45),
    ] {
        let name = Kernel::named(name).map_or(name.to_owned(), groups::ours);
        add(measure, (HOP[1], Cache), AtLeast(bound), speed(&name, FLOOR));
    }

    let measure = "five parities of eleven blocks against ISA-L";
    add(measure, (ENCODE, Cache), AtLeast(1.05), speed(&own, &isal));
    add(measure, (ENCODE, Memory), AtLeast(1.6), speed(&past, &isal));
    let measure = "five parities of eleven blocks against `reed-solomon-simd`";
    add(measure, (ENCODE, Cache), AtLeast(5.0), speed(&own, RS_SIMD));
    let measure =
        "five parities of eleven blocks against `reed-solomon-erasure` with its SIMD feature";
    add(measure, (ENCODE, Cache), AtLeast(5.0), speed(&own, RS_ERASURE_SIMD_ENCODE));

    let measure = "eleven blocks from eleven pieces, dense, against ISA-L in tiles";
    add(measure, (RECONSTRUCT, Cache), AtLeast(1.05), speed(&own, &isal_tiled));
    add(measure, (RECONSTRUCT, Memory), AtLeast(1.3), speed(&past, &isal_tiled));
    let first = sparse_of(0);
    let measure =
        "eleven blocks from the chain's first pieces against a plain copy of as many streams";
    for place in [Cache, Memory] {
        add(measure, (RECONSTRUCT, place), AtLeast(0.95), speed(&first, COPY));
    }
    let measure = "eleven blocks from the chain's first pieces against our dense matrix";
    let dense = dense_of(0);
    add(measure, (RECONSTRUCT, Cache), AtLeast(1.6), speed(&first, &dense));
    add(measure, (RECONSTRUCT, Memory), AtLeast(1.3), speed(&first, &dense));
    let measure = "the same, multiplications counted: how many times fewer than the dense matrix has coefficients";
    let count = Formula::Count(fewer_multiplications()?);
    add(measure, (RECONSTRUCT, Cache), AtLeast(4.0), count);
    // Where the program is the dense matrix the true ratio is 1, and the smallest of so many
    // medians lies below 1.
    let measure = "any five pieces missing: the worst draw against dense (1 but for noise)";
    add(measure, (ANY_FIVE, Cache), AtLeast(0.97), Formula::WorstPair);

    let measure = "fingerprint against BLAKE3, one thread";
    add(measure, (FINGERPRINT, Cache), AtLeast(2.2), speed(&own, BLAKE3));
    for (at, [measure, per_byte]) in [
        [
            "time of a hop with one local block and fingerprints against both timed alone",
            "time of a hop with one local block and fingerprints, per byte of the stream",
        ],
        [
            "time of a hop with two local blocks and fingerprints against both timed alone",
            "time of a hop with two local blocks and fingerprints, per byte of the stream",
        ],
    ]
    .into_iter()
    .enumerate()
    {
        let alone = [HOP_ALONE, FINGERPRINTS_ALONE].map(str::to_owned).to_vec();
        let time = Formula::Time(TOGETHER.to_owned(), alone);
        add(measure, (HOP_CHECKED[at], Cache), AtMost(1.05), time);
        let each = Formula::PerByte(TOGETHER.to_owned());
        add(per_byte, (HOP_CHECKED[at], Cache), AtMost(0.2), each);
    }
    Ok(bars)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::Role;

    fn outcome() -> Outcome {
        let measured = |name: &str, seconds: &[f64]| Measured {
            name: name.to_owned(),
            role: Role::Ours,
            repetitions: 1,
            seconds: seconds.to_vec(),
        };
        Outcome {
            question: "q",
            place: Place::Cache,
            buffer_bytes: 10,
            work_bytes: 10,
            contestants: vec![
                measured("a", &[1.0, 2.0, 4.0]),
                measured("b", &[2.0, 4.0, 8.0]),
                measured("c", &[3.0, 3.0, 3.0]),
                measured("d", &[3.0, 2.0, 1.0]),
            ],
        }
    }

    #[test]
    fn formulas_take_ratios_round_by_round() {
        let outcome = outcome();
        let name = |name: &str| name.to_owned();
        let median = |formula: Formula| formula.measured(&outcome).map(|measured| measured[1]);
        assert_eq!(median(Formula::Speed(name("a"), name("b"))), Some(2.0));
        assert_eq!(median(Formula::Time(name("b"), vec![name("a"), name("a")])), Some(1.0));
        assert_eq!(median(Formula::PerByte(name("a"))), Some(2e8));
        assert_eq!(median(Formula::WorstPair), Some(2.0 / 3.0));
        assert_eq!(median(Formula::Speed(name("a"), name("gone"))), None);
    }

    #[test]
    fn a_bar_is_met_missed_or_not_measured() {
        let bar = |bound, who: &str| Bar {
            measure: "m",
            question: "q",
            place: Place::Cache,
            bound,
            formula: Formula::Speed(who.to_owned(), "b".to_owned()),
        };
        let met = |bar: Bar| bar.judge(&[outcome()]).met;
        assert_eq!(met(bar(Bound::AtLeast(2.0), "a")), Some(true));
        assert_eq!(met(bar(Bound::AtLeast(2.1), "a")), Some(false));
        assert_eq!(met(bar(Bound::AtMost(1.9), "a")), Some(false));
        assert_eq!(met(bar(Bound::AtLeast(2.0), "gone")), None);
    }
}

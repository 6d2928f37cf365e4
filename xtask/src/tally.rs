//! Counts tests by reading the output of `cargo test`, `cargo nextest`, pytest and benches.

use std::ops::AddAssign;

/// The number of tests that passed and that failed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Tally {
    /// Tests that passed.
    pub passed: u64,
    /// Tests that failed or timed out.
    pub failed: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
    }
}

/// The program that prints the counts. Only its own summaries count, because the output of a failed
/// test may quote another program's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runner {
    /// `test result: ok. 3 passed; 0 failed; ...`, once for each test binary.
    Cargo,
    /// `Summary [ 0.1s] 4 tests run: 3 passed, 1 failed, 0 skipped`, once.
    Nextest,
    /// `== 3 passed, 1 failed in 0.1s ==`, once; errors of fixtures count as failures.
    Pytest,
    /// `Testing hop` and then `Success`, for each benchmark in test mode.
    Bench,
}

/// Returns the counts in one line of `runner`'s output.
pub fn of_line(runner: Runner, line: &str) -> Tally {
    let plain = without_colour(line);
    let text = plain.trim();
    let counts = match runner {
        Runner::Bench => return Tally { passed: u64::from(text == "Success"), failed: 0 },
        Runner::Cargo => text.strip_prefix("test result: "),
        Runner::Pytest => {
            let is_summary = text.contains(" in ") && text.ends_with(['s', ')', '=']);
            let is_count = |word: &str| count_before(text, word) > 0;
            let has_count = ["passed", "failed", "error"].into_iter().any(is_count);
            (is_summary && has_count).then_some(text)
        }
        Runner::Nextest => {
            text.strip_prefix("Summary [").and_then(|rest| Some(rest.split_once(" run: ")?.1))
        }
    };
    counts.map_or(Tally::default(), |counts| Tally {
        passed: count_before(counts, "passed"),
        failed: count_before(counts, "failed")
            + count_before(counts, "timed out")
            + count_before(counts, "error"),
    })
}

/// Returns the number before `word`, or 0.
fn count_before(text: &str, word: &str) -> u64 {
    let number = text.find(word).and_then(|at| text.get(..at)?.split_whitespace().last());
    number.and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// Returns the line without colours: `ESC [ ... letter` sequences are removed.
fn without_colour(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut chars = line.chars();
    while let Some(char) = chars.next() {
        if char == '\u{1b}' {
            chars.by_ref().skip(1).find(char::is_ascii_alphabetic);
        } else {
            out.push(char);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_both_runners() {
        let cargo =
            "test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out";
        assert_eq!(of_line(Runner::Nextest, cargo), Tally::default(), "quoted by a failed test");
        assert_eq!(of_line(Runner::Cargo, cargo), Tally { passed: 3, failed: 1 });
        let nextest =
            "     Summary [   0.013s] 15/16 tests run: 12 passed (1 slow), 3 failed, 4 skipped";
        assert_eq!(of_line(Runner::Nextest, nextest), Tally { passed: 12, failed: 3 });
        let late = "Summary [ 9.0s] 3 tests run: 1 passed, 1 failed, 1 timed out, 0 skipped";
        assert_eq!(of_line(Runner::Nextest, late), Tally { passed: 1, failed: 2 });
        assert_eq!(of_line(Runner::Bench, "Success"), Tally { passed: 1, failed: 0 });
    }

    #[test]
    fn colour_does_not_hide_a_summary() {
        let line = "\u{1b}[32;1m     Summary\u{1b}[0m [ 1.0s] \u{1b}[1m2\u{1b}[0m tests run: \u{1b}[1m2\u{1b}[0m passed";
        assert_eq!(of_line(Runner::Nextest, line), Tally { passed: 2, failed: 0 });
    }

    #[test]
    fn other_lines_count_nothing() {
        for line in
            ["", "test a::b ... ok", "5 passed", "Summary of the summary", "running 3 tests"]
        {
            for runner in [Runner::Cargo, Runner::Nextest, Runner::Bench] {
                assert_eq!(of_line(runner, line), Tally::default(), "{line:?}");
            }
        }
    }
}

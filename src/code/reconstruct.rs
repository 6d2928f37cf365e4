//! Plans the reconstruction of blocks from pieces with few multiplications.
//!
//! A chain code is dense as a matrix but sparse as a system of equations, if the forwarded streams
//! x_i are unknowns beside the blocks o_j. Each hop gives one equation for its piece, which needs
//! the piece, and one for its stream, which holds even when the node is lost. *Peeling* repeatedly
//! solves an equation with one unknown left. From the first k pieces of a chain whose hops bring
//! one new block each, peeling walks the chain. Where peeling gets stuck, *inactivation* computes
//! up to three unknowns densely from the pieces and peels the rest. Among the programs with the
//! fewest dense unknowns, the cheapest is taken, unless the dense matrix takes no more
//! multiplications. For other codes the dense matrix is the only way.

use super::program::{LineStep, Operand, Program};
use super::span::Span;
use super::{ChainCode, Code, CodeError, check_indices};
use crate::gf::{Matrix, field};

/// Maximum number of unknowns that are computed densely.
const MAX_SEEDS: usize = 3;

/// Returns a program that computes the wanted blocks from some of the available pieces. It prefers
/// the pieces of the first hops (or the systematic ones). The program is checked on unit vectors
/// before it is returned.
///
/// Returns [`CodeError::Index`] for a number that does not exist or occurs twice, and
/// [`CodeError::Lost`] when the pieces do not determine the blocks.
pub fn reconstruct(
    code: &Code,
    available_pieces: &[usize],
    wanted_blocks: &[usize],
) -> Result<Program, CodeError> {
    let generator = code.generator();
    check_indices("piece", available_pieces, code.n())?;
    check_indices("block", wanted_blocks, code.k())?;
    let mut available = available_pieces.to_vec();
    available.sort_unstable();
    let mut span = Span::default();
    let pieces = span.grow(generator, &available);
    let dense = wanted_blocks.iter().map(|&block| span.express_unit(block, code.k()));
    let dense: Option<Vec<Vec<u8>>> = dense.collect();
    let Some(dense) = dense else {
        let is_lost = |&block: &usize| span.express_unit(block, code.k()).is_none();
        let missing = wanted_blocks.iter().copied().filter(is_lost).collect();
        let (pieces, rank) = (available.len(), span.rank());
        return Err(CodeError::Lost { pieces, rank, k: code.k(), missing });
    };
    let dense_cost = dense.iter().map(|row| multiplications(row)).sum();
    let sparse = match code {
        Code::Chain(code) => {
            Peeling::new(code, &pieces, &span).draft_below(dense_cost, wanted_blocks)?
        }
        Code::Rs(_) => None,
    };
    let draft = sparse.unwrap_or_else(|| Draft {
        steps: dense.iter().map(|row| dense_step(row)).collect(),
        outputs: (0..dense.len()).collect(),
    });
    let program = without_idle_pieces(&pieces, draft)?;
    check(&program, generator, wanted_blocks)?;
    Ok(program)
}

/// Runs the program on unit vectors: each output must be its block and nothing else.
fn check(program: &Program, generator: &Matrix, wanted: &[usize]) -> Result<(), CodeError> {
    if wanted.is_empty() {
        return Ok(());
    }
    let made = program.to_matrix()?.mul(&generator.select(program.pieces())?)?;
    let is_unit =
        |row: &[u8], block| row.iter().enumerate().all(|(j, &e)| e == u8::from(j == block));
    if made.iter().zip(wanted).all(|(row, &block)| is_unit(row, block)) {
        return Ok(());
    }
    Err(CodeError::Defect { what: "a reconstruction program" })
}

/// The steps over the available pieces, and the register of each wanted block.
struct Draft {
    steps: Vec<LineStep>,
    outputs: Vec<usize>,
}

/// Removes the pieces that no step reads, and renumbers the inputs.
fn without_idle_pieces(pieces: &[usize], draft: Draft) -> Result<Program, CodeError> {
    let Draft { mut steps, outputs } = draft;
    let mut used = Vec::new();
    for (_, operand) in steps.iter_mut().flat_map(|step| &mut step.terms) {
        if let Operand::Input(input) = operand {
            let piece = pieces.get(*input).copied().unwrap_or(usize::MAX);
            *input = used.iter().position(|&other| other == piece).unwrap_or_else(|| {
                used.push(piece);
                used.len() - 1
            });
        }
    }
    Program::new(used, steps, outputs)
}

/// Returns the number of multiplications that a dense row of coefficients takes.
fn multiplications(row: &[u8]) -> usize {
    row.iter().filter(|&&coef| coef > 1).count()
}

fn dense_step(row: &[u8]) -> LineStep {
    let terms = row.iter().enumerate().filter(|(_, coef)| **coef != 0);
    LineStep {
        scale: 1,
        terms: terms.map(|(input, &coef)| (coef, Operand::Input(input))).collect(),
    }
}

/// An equation `piece + sum of coef * unknown = 0`. Unknown j below k is block j; unknown k + i is
/// the stream of hop i.
struct Equation {
    /// The input that appears in the equation, if any.
    input: Option<usize>,
    terms: Vec<(u8, usize)>,
    /// A bit mask of the unknowns with a nonzero coefficient.
    unknowns: u64,
}

impl Equation {
    fn new(input: Option<usize>, terms: impl Iterator<Item = (u8, usize)>) -> Self {
        let terms: Vec<(u8, usize)> = terms.filter(|&(coef, _)| coef != 0).collect();
        let unknowns = terms.iter().fold(0, |mask, &(_, unknown)| mask | 1 << unknown);
        Self { input, terms, unknowns }
    }

    /// Returns the factor by which the sum of all other terms must be multiplied to give `unknown`.
    fn scale(&self, unknown: usize) -> u8 {
        let coef = self.terms.iter().find(|term| term.1 == unknown).map_or(0, |term| term.0);
        field::inv(coef).unwrap_or(0)
    }

    /// Returns the number of multiplications that solving the equation for `unknown` takes.
    fn cost(&self, unknown: usize) -> usize {
        let others = self.terms.iter().filter(|&&(coef, other)| other != unknown && coef > 1);
        others.count() + usize::from(self.scale(unknown) > 1)
    }
}

/// The equations of a chain for the available pieces.
struct Peeling {
    equations: Vec<Equation>,
    /// The coefficients of each unknown over the inputs, if the pieces determine the unknown.
    dense: Vec<Option<Vec<u8>>>,
}

/// A choice of unknowns to compute, with the way to compute each and the total cost.
#[derive(Debug)]
struct Solution<'a> {
    peeling: &'a Peeling,
    /// The unknowns that are computed densely.
    seeds: Vec<usize>,
    /// The equations to solve after that, in order, each with the unknown that it gives.
    peeled: Vec<(usize, usize)>,
    cost: usize,
}

impl std::fmt::Debug for Peeling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Peeling({} equations)", self.equations.len())
    }
}

impl Peeling {
    fn new(code: &ChainCode, pieces: &[usize], span: &Span) -> Self {
        let (n, k) = (code.n(), code.k());
        let mut equations = Vec::new();
        for (hop, (psi, xi)) in code.psi().iter().zip(code.xi()).enumerate() {
            let before = hop.checked_sub(1).map(|before| (1, k + before));
            if let Some(input) = pieces.iter().position(|&piece| piece == hop) {
                let terms = xi.iter().copied().zip(code.blocks_of_hop(hop)).chain(before);
                equations.push(Equation::new(Some(input), terms));
            }
            if hop + 1 < n {
                let terms = psi.iter().copied().zip(code.blocks_of_hop(hop)).chain(before);
                equations.push(Equation::new(None, terms.chain([(1, k + hop)])));
            }
        }
        let streams = code.prefix_rows().iter().take(n - 1).map(|row| span.express(row));
        let dense = (0..k).map(|block| span.express_unit(block, k)).chain(streams).collect();
        Self { equations, dense }
    }

    /// Returns the draft of [`Peeling::cheapest`], if it takes fewer than `dense_cost` multiplications.
    fn draft_below(&self, dense_cost: usize, wanted: &[usize]) -> Result<Option<Draft>, CodeError> {
        let solution = self.cheapest(wanted).filter(|solution| solution.cost < dense_cost);
        solution.map(|solution| solution.into_draft(wanted)).transpose()
    }

    /// Returns the cheapest way to the wanted blocks among those with the smallest possible number
    /// of seeds.
    fn cheapest(&self, wanted: &[usize]) -> Option<Solution<'_>> {
        let goal = wanted.iter().fold(0, |mask, &block| mask | 1 << block);
        (0..=MAX_SEEDS).find_map(|count| {
            let mut best = None;
            self.try_seeds(goal, count, 0, &mut Vec::new(), &mut best);
            best
        })
    }

    /// Tries all sets of `count` more seeds from unknown `first` on.
    fn try_seeds<'a>(
        &'a self,
        goal: u64,
        count: usize,
        first: usize,
        seeds: &mut Vec<usize>,
        best: &mut Option<Solution<'a>>,
    ) {
        if count == 0 {
            if let Some(solution) = self.peel(goal, seeds)
                && best.as_ref().is_none_or(|best| solution.cost < best.cost)
            {
                *best = Some(solution);
            }
            return;
        }
        for unknown in first..self.dense.len() {
            if self.dense[unknown].is_some() {
                seeds.push(unknown);
                self.try_seeds(goal, count - 1, unknown + 1, seeds, best);
                seeds.pop();
            }
        }
    }

    /// Solves equations with one unknown until the goal is known, then drops the unknowns that the
    /// goal does not need.
    fn peel(&self, goal: u64, seeds: &[usize]) -> Option<Solution<'_>> {
        let mut known = seeds.iter().fold(0u64, |mask, &seed| mask | 1 << seed);
        let mut peeled = Vec::new();
        while goal & !known != 0 {
            let before = known;
            for (index, equation) in self.equations.iter().enumerate() {
                let left = equation.unknowns & !known;
                if left.is_power_of_two() {
                    known |= left;
                    peeled.push((index, left.trailing_zeros() as usize));
                }
            }
            if known == before {
                return None;
            }
        }
        let mut needed = goal;
        let mut kept: Vec<(usize, usize)> = Vec::new();
        let mut cost = 0;
        for (index, unknown) in peeled.into_iter().rev() {
            if needed >> unknown & 1 == 1 {
                let equation = &self.equations[index];
                needed |= equation.unknowns;
                cost += equation.cost(unknown);
                kept.push((index, unknown));
            }
        }
        kept.reverse();
        let seeds: Vec<usize> = seeds.iter().copied().filter(|&s| needed >> s & 1 == 1).collect();
        let rows = seeds.iter().filter_map(|&seed| self.dense[seed].as_deref());
        cost += rows.map(multiplications).sum::<usize>();
        Some(Solution { peeling: self, seeds, peeled: kept, cost })
    }
}

impl Solution<'_> {
    fn into_draft(self, wanted: &[usize]) -> Result<Draft, CodeError> {
        let defect = CodeError::Defect { what: "a reconstruction by peeling" };
        let mut steps = Vec::new();
        let mut register_of = vec![None; self.peeling.dense.len()];
        for &seed in &self.seeds {
            let row = self.peeling.dense[seed].as_deref().ok_or(defect.clone())?;
            register_of[seed] = Some(steps.len());
            steps.push(dense_step(row));
        }
        for &(index, unknown) in &self.peeled {
            let equation = &self.peeling.equations[index];
            let mut terms: Vec<(u8, Operand)> =
                equation.input.iter().map(|&input| (1, Operand::Input(input))).collect();
            for &(coef, other) in equation.terms.iter().filter(|term| term.1 != unknown) {
                let register = register_of[other].ok_or(defect.clone())?;
                terms.push((coef, Operand::Register(register)));
            }
            register_of[unknown] = Some(steps.len());
            steps.push(LineStep { scale: equation.scale(unknown), terms });
        }
        let outputs: Option<Vec<usize>> = wanted.iter().map(|&block| register_of[block]).collect();
        Ok(Draft { steps, outputs: outputs.ok_or(defect)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::{RsCode, table};
    use crate::entropy::{Entropy, SeededEntropy};
    use crate::gf::{self, Mode};

    fn chain(n: usize, k: usize) -> Code {
        Code::Chain(table::find(n, k).unwrap().clone())
    }

    /// Returns all subsets of `k` numbers below `n`.
    fn subsets(n: usize, k: usize) -> impl Iterator<Item = Vec<usize>> {
        let masks = (0..1usize << n).filter(move |mask| mask.count_ones() as usize == k);
        masks.map(move |mask| (0..n).filter(|i| mask >> i & 1 == 1).collect())
    }

    fn dense(code: &Code, pieces: &[usize]) -> Matrix {
        code.generator().select(pieces).unwrap().inverse().unwrap()
    }

    /// Returns blocks of random bytes, and all their pieces.
    fn encode(code: &Code, len: usize, seed: u64) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
        let entropy = SeededEntropy::new(seed);
        let mut blocks = vec![vec![0; len]; code.k()];
        blocks.iter_mut().for_each(|block| entropy.fill(block));
        let mut pieces = vec![vec![0; len]; code.n()];
        let inputs: Vec<&[u8]> = blocks.iter().map(Vec::as_slice).collect();
        let mut outputs: Vec<&mut [u8]> = pieces.iter_mut().map(Vec::as_mut_slice).collect();
        gf::apply(code.generator(), &inputs, &mut outputs, Mode::Overwrite).unwrap();
        (blocks, pieces)
    }

    #[test]
    fn every_subset_of_the_headline_code_gives_the_inverse_at_no_more_than_its_cost() {
        let (code, all) = (chain(16, 11), Vec::from_iter(0..11));
        for pieces in subsets(16, 11) {
            let program = reconstruct(&code, &pieces, &all).unwrap();
            let inverse = dense(&code, &pieces);
            // The program numbers its pieces in its own order and may leave some out.
            let place = |piece| program.pieces().iter().position(|&other| other == piece);
            let made = program.to_matrix().unwrap();
            for (made, expected) in made.iter().zip(inverse.iter()) {
                for (&piece, &expected) in pieces.iter().zip(expected) {
                    assert_eq!(place(piece).map_or(0, |input| made[input]), expected, "{pieces:?}");
                }
            }
            let cost = inverse.iter().flatten().filter(|&&coef| coef > 1).count();
            assert!(program.multiplications() <= cost, "{pieces:?}");
        }
    }

    #[test]
    fn walking_the_chain_takes_eighteen_multiplications() {
        let all = Vec::from_iter(0..11);
        let program = reconstruct(&chain(16, 11), &all, &all).unwrap();
        assert_eq!(program.multiplications(), 18);
        // Before normalisation, which saves one multiplication for each block but the last, it
        // takes 28.
        let code = table::find(16, 11).unwrap();
        let scale = |coefs: &[Vec<u8>]| -> Vec<Vec<u8>> {
            let by_block = |hop: usize, coefs: &Vec<u8>| {
                let scaled = code.blocks_of_hop(hop).zip(coefs);
                scaled.map(|(block, &coef)| field::mul(coef, field::exp(block + 1))).collect()
            };
            coefs.iter().enumerate().map(|(hop, coefs)| by_block(hop, coefs)).collect()
        };
        let (psi, xi) = (scale(code.psi()), scale(code.xi()));
        let scaled = ChainCode::new(code.layout(), code.order().to_vec(), psi, xi).unwrap();
        let program = reconstruct(&Code::Chain(scaled), &all, &all).unwrap();
        assert_eq!(program.multiplications(), 28);
    }

    /// Holds the means of docs/paper.md within bounds, over 40 draws for each number of missing pieces
    /// among the first k: the multiplications of this program at most, those of the inverse matrix at
    /// least.
    #[test]
    fn with_pieces_missing_it_stays_sparse() {
        let (code, all) = (chain(16, 11), Vec::from_iter(0..11));
        let entropy = SeededEntropy::new(1);
        for (missing, most_sparse, least_dense) in [(1, 28, 80), (3, 42, 95), (5, 48, 105)] {
            let (mut sparse, mut full) = (0, 0);
            for _ in 0..40 {
                let mut pieces = draw(&entropy, 0..11, 11 - missing);
                pieces.extend(draw(&entropy, 11..16, missing));
                sparse += reconstruct(&code, &pieces, &all).unwrap().multiplications();
                full += dense(&code, &pieces).iter().map(multiplications).sum::<usize>();
            }
            assert!(sparse <= 40 * most_sparse, "{missing} missing: {sparse} / 40");
            assert!(full >= 40 * least_dense, "{missing} missing: {full} / 40 dense");
        }
    }

    /// Draws `count` different numbers from the range.
    fn draw(entropy: &SeededEntropy, from: std::ops::Range<usize>, count: usize) -> Vec<usize> {
        let mut numbers = Vec::from_iter(from);
        while numbers.len() > count {
            numbers.remove(entropy.below(numbers.len() as u64) as usize);
        }
        numbers
    }

    #[test]
    fn random_bytes_come_back() {
        for (code, step) in [
            (chain(16, 11), 37),
            (chain(8, 4), 1),
            (chain(16, 12), 91),
            (Code::Rs(RsCode::new(16, 11).unwrap()), 41),
            (Code::Rs(RsCode::new(6, 4).unwrap()), 1),
        ] {
            let (blocks, pieces) = encode(&code, 1000, 5);
            for (seed, available) in subsets(code.n(), code.k()).step_by(step).enumerate() {
                let mut wanted: Vec<usize> = (0..code.k()).collect();
                wanted.rotate_left(seed % code.k());
                wanted.truncate(1 + seed % code.k());
                let program = reconstruct(&code, &available, &wanted).unwrap();
                let inputs: Vec<&[u8]> =
                    program.pieces().iter().map(|&piece| &pieces[piece][..]).collect();
                let mut got = vec![vec![0xa5; 1000]; wanted.len()];
                let mut outputs: Vec<&mut [u8]> = got.iter_mut().map(Vec::as_mut_slice).collect();
                program.run(&inputs, &mut outputs, Mode::Overwrite).unwrap();
                for (&block, got) in wanted.iter().zip(&got) {
                    assert_eq!(got, &blocks[block], "{code} block {block} from {available:?}");
                }
            }
        }
    }

    #[test]
    fn few_pieces_are_enough_for_the_blocks_that_they_determine() {
        let code = chain(16, 11);
        // The first two hops run on positions 1 and 0 (2 and 1 in the paper), which hold blocks 1
        // and 0.
        let program = reconstruct(&code, &[0, 1], &[0, 1]).unwrap();
        assert_eq!(program.pieces(), [0, 1]);
        let rs = Code::Rs(RsCode::new(16, 11).unwrap());
        let program = reconstruct(&rs, &[3, 12, 5], &[5, 3]).unwrap();
        assert_eq!((program.pieces(), program.multiplications()), (&[5, 3][..], 0));
    }

    #[test]
    fn lost_blocks_are_named() {
        let error = reconstruct(&chain(16, 11), &[0, 1, 9], &[0, 4]).unwrap_err();
        assert_eq!(error, CodeError::Lost { pieces: 3, rank: 3, k: 11, missing: vec![4] });
        assert!(error.to_string().contains("find 8 more pieces"), "{error}");
        // With the published order, the loss of nodes 10, 11, 15 and 16 is fatal (design of the
        // code).
        let paper = Code::Chain(ChainCode::paper(16, 11).unwrap());
        let rest: Vec<usize> = (0..16).filter(|i| ![9, 10, 14, 15].contains(i)).collect();
        let error = reconstruct(&paper, &rest, &Vec::from_iter(0..11)).unwrap_err();
        assert!(matches!(error, CodeError::Lost { pieces: 12, rank: 10, .. }), "{error}");
    }

    #[test]
    fn wrong_numbers_are_refused() {
        let code = chain(4, 2);
        for (available, wanted) in [(&[0, 0][..], &[0][..]), (&[4, 0], &[0]), (&[0, 1], &[2])] {
            let error = reconstruct(&code, available, wanted);
            assert!(matches!(error, Err(CodeError::Index { .. })), "{error:?}");
        }
        assert!(reconstruct(&code, &[0, 1], &[1, 1]).is_err());
        assert!(reconstruct(&code, &[], &[]).unwrap().steps().is_empty());
    }
}

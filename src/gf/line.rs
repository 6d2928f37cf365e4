//! Straight-line programs over streams: each register is a sum of a few inputs and earlier
//! registers. A reconstruction that solves a sparse system of equations has this form, and
//! [`super::Kernel::run`] runs it with all registers for some bytes in the nearest cache.

use super::GfError;

/// The source of a term of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operand {
    /// An input, by its number.
    Input(usize),
    /// The result of an earlier step, by its number.
    Register(usize),
}

/// A step, which computes one new register: `scale * sum of coef * operand`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineStep {
    /// The factor of the whole sum.
    pub scale: u8,
    /// The terms of the sum.
    pub terms: Vec<(u8, Operand)>,
}

impl LineStep {
    /// Returns the number of multiplications that the step takes. Multiplications by 0 and 1 are
    /// free.
    pub fn multiplications(&self) -> usize {
        let factors = self.terms.iter().map(|&(coef, _)| coef).chain([self.scale]);
        factors.filter(|&factor| factor > 1).count()
    }
}

/// A straight-line program, ready to run.
///
/// Invariants, which kernels rely on: every operand is an input below `inputs`, a slot that an
/// earlier operation has written, or the last result of the preceding operation; every target is an
/// output below `outputs` or a slot; every output and every slot is the target of exactly one result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub(super) operations: Vec<Operation>,
    pub(super) terms: Vec<Term>,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    /// For each slot, the output that holds the same register, if there is one.
    pub(super) outputs_of_slots: Vec<Option<usize>>,
}

/// The unit of execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Sum(Sum),
    Link(Link),
}

/// A single step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sum {
    /// The index of its first term in `terms`.
    pub first: usize,
    /// The number of its terms.
    pub count: usize,
    pub scale: u8,
    pub target: Target,
}

/// Two steps in the form that a hop of a chain gives: `o = scale (input + x + e o')`, then `x +
/// forward o + f o'`, where x is the last result and o' is in a slot. If both steps run together,
/// half of their operands stay in registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link {
    pub input: usize,
    /// Whether x is the last result; otherwise x is zero.
    pub goes_on: bool,
    /// The slot of o', and the coefficients e and f.
    pub known: Option<(usize, u8, u8)>,
    pub scale: u8,
    pub forward: u8,
    /// The destination of o.
    pub target: Target,
    /// The destination of the second result.
    pub next: Target,
}

/// The destination of a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Target {
    /// The output to which the register is written, if there is one.
    pub output: Option<usize>,
    /// The slot that keeps the register for operations after the next one. A kernel may read the
    /// register back from its output instead.
    pub slot: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Term {
    pub coef: u8,
    pub source: Source,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Input(usize),
    /// A register that is kept in a slot.
    Slot(usize),
    /// The result of the preceding operation.
    Last,
}

impl Line {
    /// Maximum number of registers that can be kept in slots.
    pub const MAX_SLOTS: usize = 64;

    /// Returns the program in which step i computes register i from `inputs` inputs and earlier
    /// registers, and output j is register `outputs[j]`. Returns `None` if a step has no terms, reads
    /// an input that does not exist or a register that is not earlier, if an output does not exist or
    /// occurs twice, or if too many registers must be kept.
    pub fn new(inputs: usize, steps: &[LineStep], outputs: &[usize]) -> Option<Self> {
        let is_distinct = |(at, register): (usize, &usize)| {
            *register < steps.len() && !outputs[..at].contains(register)
        };
        if !outputs.iter().enumerate().all(is_distinct) {
            return None;
        }
        let units = units(steps);
        // The last result of each unit is available in the next unit without a slot.
        let is_kept = |register: usize, unit: usize| {
            let at_hand = units[unit].end == register + 1;
            let later = units
                .iter()
                .enumerate()
                .skip(unit)
                .filter(|(other, _)| *other > unit + usize::from(at_hand));
            let reads = |step: &LineStep| {
                step.terms.iter().any(|&(_, operand)| operand == Operand::Register(register))
            };
            later.into_iter().any(|(_, unit)| steps[unit.clone()].iter().any(reads))
        };
        let output_of = |register| outputs.iter().position(|&output| output == register);
        let mut slot_of = vec![None; steps.len()];
        let mut outputs_of_slots = Vec::new();
        for (unit, registers) in units.iter().enumerate() {
            for register in registers.clone().filter(|&register| is_kept(register, unit)) {
                slot_of[register] = Some(outputs_of_slots.len());
                outputs_of_slots.push(output_of(register));
            }
        }
        let target =
            |register: usize| Target { output: output_of(register), slot: slot_of[register] };
        let (mut operations, mut terms) = (Vec::new(), Vec::new());
        for unit in &units {
            let register = unit.start;
            let step = &steps[register];
            if unit.len() == 2 {
                let shape = link_shape(steps, register)?;
                let known = match shape.known {
                    Some((known, e, f)) => Some((slot_of[known]?, e, f)),
                    None => None,
                };
                let is_input = shape.input < inputs;
                operations.push(Operation::Link(Link {
                    input: is_input.then_some(shape.input)?,
                    goes_on: shape.goes_on,
                    known,
                    scale: step.scale,
                    forward: shape.forward,
                    target: target(register),
                    next: target(register + 1),
                }));
                continue;
            }
            let first = terms.len();
            for &(coef, operand) in &step.terms {
                let source = match operand {
                    Operand::Input(input) if input < inputs => Source::Input(input),
                    Operand::Register(earlier) if earlier + 1 == register => Source::Last,
                    Operand::Register(earlier) if earlier < register => {
                        Source::Slot(slot_of[earlier]?)
                    }
                    _ => return None,
                };
                terms.push(Term { coef, source });
            }
            let (count, scale) = (terms.len() - first, step.scale);
            let target = target(register);
            operations.push(Operation::Sum(Sum { first, count, scale, target }));
        }
        let is_whole = steps.iter().all(|step| !step.terms.is_empty());
        let outputs = outputs.len();
        (is_whole && outputs_of_slots.len() <= Self::MAX_SLOTS).then_some(Self {
            operations,
            terms,
            inputs,
            outputs,
            outputs_of_slots,
        })
    }

    /// Returns the cost of a run in products of a vector with a constant, as measured with AVX-512.
    /// The cost covers loading and multiplying each term, storing each result, and dispatching each
    /// operation once for every few vectors.
    pub fn cost(&self) -> usize {
        let of = |operation: &Operation| match operation {
            Operation::Sum(sum) => 4 + 2 * sum.count,
            Operation::Link(_) => 6,
        };
        self.operations.iter().map(of).sum()
    }

    /// Returns the cost of a dense matrix, in the unit of [`Line::cost`]. Every entry is a product,
    /// whatever its value.
    pub fn dense_cost(rows: usize, cols: usize) -> usize {
        rows * cols + 2 * (rows + cols)
    }

    /// Returns the common length of all buffers, or an error if their number or lengths do not fit.
    pub(super) fn check(&self, inputs: &[&[u8]], outputs: &[&mut [u8]]) -> Result<usize, GfError> {
        super::kernel::check((self.outputs, self.inputs), &[], inputs, outputs)
    }
}

/// The values of a [`Link`] that two steps determine.
struct Shape {
    input: usize,
    goes_on: bool,
    /// An earlier register, and its coefficient in each of the two steps.
    known: Option<(usize, u8, u8)>,
    forward: u8,
}

/// Returns the shape of the two steps from `register` on if they form a link: see [`Link`].
fn link_shape(steps: &[LineStep], register: usize) -> Option<Shape> {
    let [step, next] = steps.get(register..register + 2)? else { return None };
    let before = register.checked_sub(1).map(Operand::Register);
    let (mut input, mut goes_on, mut e) = (None, false, None);
    for &(coef, operand) in &step.terms {
        match operand {
            Operand::Input(at) if coef == 1 && input.is_none() => input = Some(at),
            last if coef == 1 && Some(last) == before && !goes_on => goes_on = true,
            Operand::Register(known) if known < register && e.is_none() => e = Some((known, coef)),
            _ => return None,
        }
    }
    let (mut forward, mut also_goes_on, mut f) = (None, false, None);
    for &(coef, operand) in &next.terms {
        match operand {
            Operand::Register(of) if of == register && forward.is_none() => forward = Some(coef),
            last if coef == 1 && Some(last) == before && !also_goes_on => also_goes_on = true,
            Operand::Register(known) if known < register && f.is_none() => f = Some((known, coef)),
            _ => return None,
        }
    }
    let known = match (e, f) {
        (None, None) => None,
        (Some((known, e)), Some((other, f))) if known == other => Some((known, e, f)),
        _ => return None,
    };
    // The preceding result is available without a slot, so it cannot be the kept register.
    let is_apart = known.is_none_or(|(known, ..)| known + 1 < register);
    (next.scale == 1 && goes_on == also_goes_on && is_apart).then_some(Shape {
        input: input?,
        goes_on,
        known,
        forward: forward?,
    })
}

/// Groups the steps into the units that run at once, of one or two steps each.
fn units(steps: &[LineStep]) -> Vec<std::ops::Range<usize>> {
    let mut units = Vec::new();
    let mut at = 0;
    while at < steps.len() {
        let len = if link_shape(steps, at).is_some() { 2 } else { 1 };
        units.push(at..at + len);
        at += len;
    }
    units
}

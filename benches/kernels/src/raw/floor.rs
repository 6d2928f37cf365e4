//! The floor: loops that move the streams of a hop and only XOR them, which no code can avoid. The
//! difference between a kernel and these loops is the cost of its multiplications.
//!
//! With AVX-512 the loops use its registers directly, so that the measurement does not depend on
//! the compiler. Elsewhere they are plain loops without non-temporal stores.

/// The kind of store instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stores {
    /// Stores into the caches.
    Plain,
    /// Stores past the caches, for bytes that are not read soon.
    NonTemporal,
}

/// Returns whether this processor has the loops with non-temporal stores.
pub fn has_non_temporal() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Writes the sum of all inputs to each output.
///
/// # Panics
/// Panics if lengths differ or are not a multiple of 256, or if an output of non-temporal stores
/// does not start at a multiple of 64.
#[inline(never)]
pub fn xor<const I: usize, const O: usize>(
    inputs: [&[u8]; I],
    mut outputs: [&mut [u8]; O],
    stores: Stores,
) {
    let bytes = inputs[0].len();
    assert!(inputs.iter().all(|input| input.len() == bytes) && bytes.is_multiple_of(STEP_BYTES));
    assert!(outputs.iter().all(|output| output.len() == bytes));
    #[cfg(target_arch = "x86_64")]
    if has_non_temporal() {
        let aligned = |output: &&mut [u8]| output.as_ptr().addr().is_multiple_of(64);
        assert!(stores == Stores::Plain || outputs.iter().all(aligned));
        let inputs = inputs.map(|input| input.as_ptr());
        let outputs = outputs.map(|output| output.as_mut_ptr());
        // SAFETY: the processor has AVX-512F. All buffers are `bytes` long, a multiple of
        // STEP_BYTES. No output overlaps another buffer, because outputs are borrowed mutably.
        // Outputs are aligned for non-temporal stores, as asserted above.
        unsafe {
            match stores {
                Stores::Plain => avx512::xor::<I, O, false>(inputs, outputs, bytes),
                Stores::NonTemporal => avx512::xor::<I, O, true>(inputs, outputs, bytes),
            }
        }
        return;
    }
    let _ = stores;
    let [first, rest @ ..] = &mut outputs[..] else { return };
    first.copy_from_slice(inputs[0]);
    for input in &inputs[1..] {
        first.iter_mut().zip(*input).for_each(|(sum, byte)| *sum ^= byte);
    }
    rest.iter_mut().for_each(|output| output.copy_from_slice(first));
}

/// Adds `source` to `target`.
///
/// # Panics
/// Panics under the conditions of [`xor`].
#[inline(never)]
pub fn xor_into(target: &mut [u8], source: &[u8]) {
    let bytes = target.len();
    assert!(source.len() == bytes && bytes.is_multiple_of(STEP_BYTES));
    #[cfg(target_arch = "x86_64")]
    if has_non_temporal() {
        let target = target.as_mut_ptr();
        // SAFETY: as in `xor`. The target may be an input as well, because the loop reads each step
        // before it writes it, through pointers from the one mutable borrow.
        unsafe {
            avx512::xor::<2, 1, false>([target.cast_const(), source.as_ptr()], [target], bytes)
        };
        return;
    }
    target.iter_mut().zip(source).for_each(|(sum, byte)| *sum ^= byte);
}

/// Bytes of each stream that one step of a loop moves.
const STEP_BYTES: usize = 256;

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::STEP_BYTES;

    /// Vectors of each stream in one step. Of 1, 2 and 4, this is the fastest in cache.
    const WIDTH: usize = 1;
    const VECTOR: usize = 64;

    /// # Safety
    /// Every pointer must be valid for `bytes`, a multiple of [`STEP_BYTES`]. An output must not
    /// overlap another output or an input, unless it is that input. With `NT`, outputs must be
    /// aligned to 64.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn xor<const I: usize, const O: usize, const NT: bool>(
        inputs: [*const u8; I],
        outputs: [*mut u8; O],
        bytes: usize,
    ) {
        const { assert!(STEP_BYTES.is_multiple_of(WIDTH * VECTOR)) };
        let mut at = 0;
        while at < bytes {
            let mut sums = [_mm512_setzero_si512(); WIDTH];
            for input in inputs {
                for (w, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: at + WIDTH * VECTOR <= bytes, for which the input is valid.
                    let data = unsafe { _mm512_loadu_si512(input.add(at + w * VECTOR).cast()) };
                    *sum = _mm512_xor_si512(*sum, data);
                }
            }
            for output in outputs {
                for (w, &sum) in sums.iter().enumerate() {
                    // SAFETY: at + WIDTH * VECTOR <= bytes, for which the output is valid. With NT
                    // it is aligned to 64, and so is every vector after it.
                    unsafe {
                        let target = output.add(at + w * VECTOR).cast();
                        if NT {
                            _mm512_stream_si512(target, sum);
                        } else {
                            _mm512_storeu_si512(target, sum);
                        }
                    }
                }
            }
            at += WIDTH * VECTOR;
        }
        if NT {
            _mm_sfence();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::memory::Arena;

    #[test]
    fn sums_are_sums() {
        let mut arena = Arena::new(5, 4096).unwrap();
        let [a, b, c, x, y] = arena.buffers(5, 4096).unwrap().try_into().unwrap();
        let expected: Vec<u8> = (0..4096).map(|t| a[t] ^ b[t] ^ c[t]).collect();
        for stores in [Stores::Plain, Stores::NonTemporal] {
            x.fill(0);
            xor([a, b, c], [x, y], stores);
            assert!(x[..] == expected && y[..] == expected, "{stores:?}");
        }
        xor_into(x, a);
        assert!((0..4096).all(|t| x[t] == b[t] ^ c[t]));
    }
}

//! Straight-line programs, for any vector type. All registers of the program are processed for a
//! few vectors at a time, so that values between hops stay in the processor's registers.

/// Instantiates `run`, which runs a [`super::LineTask`], with instructions of `$features`. The
/// surrounding module must have the definitions that [`loops`](super::loops) needs, and must
/// instantiate `loops!`, whose `fetch_ahead` is used here. A register of the program is `$wide` vectors
/// at once, or `$stream` vectors when outputs are written by non-temporal stores.
macro_rules! lines {
    ($features:literal, wide $wide:literal, stream $stream:literal) => {
        /// Runs a straight-line program over the bytes of the task, as far as whole passes reach.
        /// Returns the number of bytes that are done.
        #[target_feature(enable = $features)]
        pub(super) fn run(task: &LineTask<'_>) -> usize {
            match task.way {
                Way::Near => {
                    let done = line::<$wide, false, false>(task, 0);
                    line::<{ STEP_BYTES / VECTOR }, false, false>(task, done)
                }
                Way::Far => line::<$wide, true, false>(task, 0),
                Way::Stream => {
                    let done = line::<$stream, true, true>(task, 0);
                    _mm_sfence();
                    done
                }
            }
        }

        /// Processes `W` vectors of each register at a time, from `at` on. Returns the offset of
        /// the first byte that is not done.
        #[target_feature(enable = $features)]
        fn line<const W: usize, const FAR: bool, const STREAM: bool>(
            task: &LineTask<'_>,
            mut at: usize,
        ) -> usize {
            let mut slots = vec![[zero(); W]; task.line.outputs_of_slots.len()];
            while at + W * VECTOR <= task.bytes {
                let mut last = [zero(); W];
                let mut o = 0;
                while o < task.line.operations.len() {
                    match &task.line.operations[o] {
                        Operation::Link(link) => {
                            let mut sums = read::<W, FAR>(task, link.input, at);
                            if !link.goes_on {
                                last = [zero(); W];
                            }
                            let mut x = last;
                            for w in 0..W {
                                sums[w] = xor(sums[w], x[w]);
                            }
                            if let Some((slot, e, f)) = link.known {
                                let known = kept::<W, STREAM>(task, &slots, slot, at);
                                let (e, f) = (factor(e), factor(f));
                                for w in 0..W {
                                    sums[w] = xor(sums[w], product(e, known[w]));
                                    x[w] = xor(x[w], product(f, known[w]));
                                }
                            }
                            let scale = factor(link.scale);
                            for w in 0..W {
                                sums[w] = product(scale, sums[w]);
                            }
                            put::<W, STREAM>(task, &mut slots, link.target, at, &sums);
                            if link.forward == 1 {
                                for w in 0..W {
                                    x[w] = xor(x[w], sums[w]);
                                }
                            } else {
                                let forward = factor(link.forward);
                                for w in 0..W {
                                    x[w] = xor(x[w], product(forward, sums[w]));
                                }
                            }
                            last = x;
                            put::<W, STREAM>(task, &mut slots, link.next, at, &last);
                        }
                        Operation::Sum(sum) => {
                            let mut sums = [zero(); W];
                            let mut t = sum.first;
                            while t < sum.first + sum.count {
                                let term = task.line.terms[t];
                                let data = match term.source {
                                    Source::Input(input) => read::<W, FAR>(task, input, at),
                                    Source::Slot(slot) => kept::<W, STREAM>(task, &slots, slot, at),
                                    Source::Last => last,
                                };
                                let factor = factor(term.coef);
                                for w in 0..W {
                                    sums[w] = xor(sums[w], product(factor, data[w]));
                                }
                                t += 1;
                            }
                            let scale = factor(sum.scale);
                            for w in 0..W {
                                last[w] = product(scale, sums[w]);
                            }
                            put::<W, STREAM>(task, &mut slots, sum.target, at, &last);
                        }
                    }
                    o += 1;
                }
                at += W * VECTOR;
            }
            at
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn read<const W: usize, const FAR: bool>(
            task: &LineTask<'_>,
            input: usize,
            at: usize,
        ) -> [Vector; W] {
            assert!(at + W * VECTOR <= task.bytes);
            let source = task.sources[input].wrapping_add(at);
            let mut data = [zero(); W];
            for w in 0..W {
                let source = source.wrapping_add(w * VECTOR);
                if FAR && w * VECTOR % LINE_BYTES == 0 {
                    fetch_ahead(source);
                }
                // SAFETY: at + W * VECTOR <= bytes, and `bytes` bytes can be read from each source.
                data[w] = unsafe { load(source) };
            }
            data
        }

        /// Writes a result to its output, and keeps it where [`kept`] looks it up.
        #[inline]
        #[target_feature(enable = $features)]
        fn put<const W: usize, const STREAM: bool>(
            task: &LineTask<'_>,
            slots: &mut [[Vector; W]],
            target: Target,
            at: usize,
            data: &[Vector; W],
        ) {
            if let Some(output) = target.output {
                write::<W, STREAM>(task, output, at, data);
            }
            if let Some(slot) = target.slot
                && (STREAM || target.output.is_none())
            {
                slots[slot] = *data;
            }
        }

        /// Returns a result that was kept: from its output, if it has one and outputs are not
        /// written past the caches, otherwise from its slot. Reading from the output saves a store
        /// for each block that later hops hold again.
        #[inline]
        #[target_feature(enable = $features)]
        fn kept<const W: usize, const STREAM: bool>(
            task: &LineTask<'_>,
            slots: &[[Vector; W]],
            slot: usize,
            at: usize,
        ) -> [Vector; W] {
            match task.line.outputs_of_slots[slot] {
                Some(output) if !STREAM => {
                    assert!(at + W * VECTOR <= task.bytes);
                    let source = task.targets[output].wrapping_add(at).cast_const();
                    let mut data = [zero(); W];
                    for w in 0..W {
                        // SAFETY: at + W * VECTOR <= bytes, and `bytes` bytes can be read from each
                        // target.
                        data[w] = unsafe { load(source.wrapping_add(w * VECTOR)) };
                    }
                    data
                }
                _ => slots[slot],
            }
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn write<const W: usize, const STREAM: bool>(
            task: &LineTask<'_>,
            output: usize,
            at: usize,
            data: &[Vector; W],
        ) {
            assert!(at + W * VECTOR <= task.bytes);
            let target = task.targets[output].wrapping_add(at);
            for w in 0..W {
                let target = target.wrapping_add(w * VECTOR);
                // SAFETY: the same bytes can be written to each target, and with `STREAM` the
                // targets are aligned.
                unsafe { if STREAM { stream(target, data[w]) } else { store(target, data[w]) } };
            }
        }
    };
}

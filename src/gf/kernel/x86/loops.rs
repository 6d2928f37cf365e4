//! The loops over many bytes, for any vector.
//!
//! They count with indices: what iterators are made of is compiled elsewhere, and not always inlined into functions with features.

/// Sources are fetched so far ahead of their loads when they come from memory.
pub(super) const PREFETCH_BYTES: usize = 256;

/// Functions of some features that are inlined into the loops.
macro_rules! inline {
    ($features:literal $($body:item)*) => {
        $(#[inline]
        #[target_feature(enable = $features)]
        $body)*
    };
}

/// Pastes `apply`, which runs a [`super::Task`], with instructions of `$features`. Around it must be: `Vector` of `VECTOR` bytes; `zero`,
/// `load`, `store`, `stream`, `xor`; `Factor`, made by `factor` from a constant, which `product` multiplies by.
///
/// `$rows` are the numbers of rows that one pass can have, of which the last is the most; each with the vectors of a row that are summed at
/// once, near and far. `$shapes` are those of hops, whose factors stay in registers: (rows, columns but for the plain ones, plain columns, vectors at
/// once). `$line` are the vectors of a register of a straight-line program.
macro_rules! loops {
    ($features:literal, most $most:literal, rows $(($rows:literal, $near:literal, $far:literal))*,
     line $line:literal, shapes $(($r:literal, $s:literal, $plain:literal, $wide:literal))*) => {
        #[target_feature(enable = $features)]
        pub(super) fn apply(task: &Task<'_>) {
            for first in (0..task.rows).step_by($most) {
                if task.rows <= $most {
                    apply_part(task);
                    break;
                }
                let mut coefs = [[0; GROUP_OUTPUTS]; GROUP_INPUTS];
                apply_part(&task.rows_from(&mut coefs, first, $most));
            }
            if task.way == Way::Stream {
                // Stores past the caches are ordered with nothing else: whoever is told of the result must see it.
                _mm_sfence();
            }
        }

        #[target_feature(enable = $features)]
        fn apply_part(task: &Task<'_>) {
            match task.way {
                Way::Near => apply_near(task),
                Way::Far => apply_far::<false>(task),
                Way::Stream => apply_far::<true>(task),
            }
        }

        #[target_feature(enable = $features)]
        fn apply_near(task: &Task<'_>) {
            let plain = if task.is_first_plain && !task.accumulate { task.per_buffer } else { 0 };
            match (task.rows, task.columns.wrapping_sub(plain), plain) {
                // What is written over what was just read waits less when it comes in longer runs.
                $(($r, $s, $plain) if task.sources[0] == task.targets[0].cast_const() => {
                    hop::<$r, $s, $plain, { STEP_BYTES / VECTOR / $plain }, false, false>(task)
                })*
                $(($r, $s, $plain) => hop::<$r, $s, $plain, $wide, false, false>(task),)*
                _ => match (task.rows, task.per_buffer) {
                    $(($rows, 1) => general::<$rows, $near, false, false>(task),)*
                    // A step has one vector of each half.
                    $(($rows, _) => general::<$rows, 1, false, false>(task),)*
                    _ => {}
                },
            }
        }

        #[target_feature(enable = $features)]
        fn apply_far<const STREAM: bool>(task: &Task<'_>) {
            let plain = if task.is_first_plain && !task.accumulate { task.per_buffer } else { 0 };
            match (task.rows, task.columns.wrapping_sub(plain), plain) {
                $(($r, $s, $plain) => hop::<$r, $s, $plain, 1, true, STREAM>(task),)*
                _ => match task.rows {
                    $($rows => general::<$rows, $far, true, STREAM>(task),)*
                    _ => {}
                },
            }
        }

        /// `R` rows of `P` plain columns, which count once in every row of their half, and `S` others; `W` vectors of each at a time.
        #[target_feature(enable = $features)]
        fn hop<
            const R: usize,
            const S: usize,
            const P: usize,
            const W: usize,
            const FAR: bool,
            const STREAM: bool,
        >(
            task: &Task<'_>,
        ) {
            let mut factors = [[factor(0); R]; S];
            let mut sources = [std::ptr::null(); S];
            let mut plain = [std::ptr::null(); P];
            let mut targets = [std::ptr::null_mut(); R];
            for s in 0..S {
                sources[s] = task.sources[P + s];
                for r in 0..R {
                    factors[s][r] = factor(task.coefs[P + s][r]);
                }
            }
            for p in 0..P {
                plain[p] = task.sources[p];
            }
            for r in 0..R {
                targets[r] = task.targets[r];
            }
            assert!(task.bytes.is_multiple_of(W * VECTOR * P), "a pass over half a step");
            let mut at = 0;
            while at < task.bytes {
                let mut sums = [[zero(); W]; R];
                for w in 0..W {
                    let at = at + w * VECTOR * P;
                    for p in 0..P {
                        let source = plain[p].wrapping_add(at);
                        if FAR {
                            fetch_ahead(source);
                        }
                        // SAFETY: `at` is within the task's bytes, whose whole steps can be read from each source.
                        let data = unsafe { load(source) };
                        for r in 0..R {
                            if r % P == p {
                                sums[r][w] = xor(sums[r][w], data);
                            }
                        }
                    }
                    for s in 0..S {
                        let source = sources[s].wrapping_add(at);
                        if FAR {
                            fetch_ahead(source);
                        }
                        // SAFETY: as above.
                        let data = unsafe { load(source) };
                        for r in 0..R {
                            sums[r][w] = xor(sums[r][w], product(factors[s][r], data));
                        }
                    }
                }
                for r in 0..R {
                    for w in 0..W {
                        let target = targets[r].wrapping_add(at + w * VECTOR * P);
                        // SAFETY: the same steps of each target can be written; they are aligned when the task says stream.
                        unsafe { if STREAM { stream(target, sums[r][w]) } else { store(target, sums[r][w]) } };
                    }
                }
                at += W * VECTOR * P;
            }
        }

        /// `R` rows of any columns, `W` vectors of each at a time.
        #[target_feature(enable = $features)]
        fn general<const R: usize, const W: usize, const FAR: bool, const STREAM: bool>(
            task: &Task<'_>,
        ) {
            let columns = task.columns.min(GROUP_INPUTS);
            let mut factors = [[raw(0); R]; GROUP_INPUTS];
            for s in 0..columns {
                for r in 0..R {
                    factors[s][r] = raw(task.coefs[s][r]);
                }
            }
            let gap = VECTOR * task.per_buffer;
            assert!(task.bytes.is_multiple_of(W * gap), "a pass over half a step");
            let mut at = 0;
            while at < task.bytes {
                let mut sums = [[zero(); W]; R];
                if task.accumulate {
                    for r in 0..R {
                        for w in 0..W {
                            let target = task.targets[r].wrapping_add(at + w * gap);
                            // SAFETY: `at` is within the task's bytes, whose whole steps can be read from each target.
                            sums[r][w] = unsafe { load(target.cast_const()) };
                        }
                    }
                }
                for s in 0..columns {
                    let mut data = [zero(); W];
                    for w in 0..W {
                        let source = task.sources[s].wrapping_add(at + w * gap);
                        if FAR {
                            fetch_ahead(source);
                        }
                        // SAFETY: the same steps can be read from each source.
                        data[w] = unsafe { load(source) };
                    }
                    for r in 0..R {
                        let factor = from_raw(factors[s][r]);
                        for w in 0..W {
                            sums[r][w] = xor(sums[r][w], product(factor, data[w]));
                        }
                    }
                }
                for r in 0..R {
                    for w in 0..W {
                        let target = task.targets[r].wrapping_add(at + w * gap);
                        // SAFETY: the same steps of each target can be written; they are aligned when the task says stream.
                        unsafe { if STREAM { stream(target, sums[r][w]) } else { store(target, sums[r][w]) } };
                    }
                }
                at += W * gap;
            }
        }

        /// Runs a straight-line program over as many bytes of the task as come out whole; answers with how many.
        #[target_feature(enable = $features)]
        pub(super) fn run(task: &LineTask<'_>) -> usize {
            match task.way {
                Way::Near => {
                    let done = line::<$line, false, false>(task, 0);
                    line::<{ STEP_BYTES / VECTOR }, false, false>(task, done)
                }
                Way::Far => line::<$line, true, false>(task, 0),
                Way::Stream => {
                    let done = line::<$line, true, true>(task, 0);
                    _mm_sfence();
                    done
                }
            }
        }

        /// `W` vectors of each register at a time, from `at` on.
        #[target_feature(enable = $features)]
        fn line<const W: usize, const FAR: bool, const STREAM: bool>(
            task: &LineTask<'_>,
            mut at: usize,
        ) -> usize {
            let mut slots = vec![[zero(); W]; task.line.slots];
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
                                let (known, e, f) = (&slots[slot], factor(e), factor(f));
                                for w in 0..W {
                                    sums[w] = xor(sums[w], product(e, known[w]));
                                    x[w] = xor(x[w], product(f, known[w]));
                                }
                            }
                            let scale = factor(link.scale);
                            for w in 0..W {
                                sums[w] = product(scale, sums[w]);
                            }
                            if let Some(slot) = link.target.slot {
                                slots[slot] = sums;
                            }
                            if let Some(output) = link.target.output {
                                write::<W, STREAM>(task, output, at, &sums);
                            }
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
                            if let Some(slot) = link.next.slot {
                                slots[slot] = last;
                            }
                            if let Some(output) = link.next.output {
                                write::<W, STREAM>(task, output, at, &last);
                            }
                        }
                        Operation::Sum(sum) => {
                            let mut sums = [zero(); W];
                            let mut t = sum.first;
                            while t < sum.first + sum.count {
                                let term = task.line.terms[t];
                                let data = match term.source {
                                    Source::Input(input) => read::<W, FAR>(task, input, at),
                                    Source::Slot(slot) => slots[slot],
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
                            if let Some(slot) = sum.target.slot {
                                slots[slot] = last;
                            }
                            if let Some(output) = sum.target.output {
                                write::<W, STREAM>(task, output, at, &last);
                            }
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
                // SAFETY: at + W * VECTOR <= bytes, which can be read from each source.
                data[w] = unsafe { load(source) };
            }
            data
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
                // SAFETY: the same bytes can be written to each target; they are aligned when the task says stream.
                unsafe { if STREAM { stream(target, data[w]) } else { store(target, data[w]) } };
            }
        }

        /// May point past the source: fetching an address that is not mapped does nothing.
        #[target_feature(enable = $features)]
        fn fetch_ahead(source: *const u8) {
            _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(PREFETCH_BYTES).cast());
        }
    };
}

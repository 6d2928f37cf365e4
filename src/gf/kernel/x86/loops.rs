//! The loops over many bytes, for any vector type.
//!
//! The loops use indices instead of iterators: the functions of an iterator are compiled without
//! the target features, and are not always inlined into functions with features.

/// The distance in bytes between a prefetch and the load, for sources in memory.
pub(super) const PREFETCH_BYTES: usize = 256;

/// Defines functions with some target features that are inlined into the loops.
macro_rules! inline {
    ($features:literal $($body:item)*) => {
        $(#[inline]
        #[target_feature(enable = $features)]
        $body)*
    };
}

/// Instantiates `apply`, which runs a [`super::Task`], with instructions of `$features`. The
/// surrounding module must define `Vector` of `VECTOR` bytes; `zero`, `load`, `store`, `stream` and
/// `xor`; `xor3`, the sum of three, which is used if `HAS_XOR3`; `factor`, which makes from a constant
/// the form by which `product` multiplies a vector; and the two halves of `factor`: `raw`, which looks
/// the constant up in a table, and `from_raw`, which loads the result into registers.
///
/// `$most` is the maximum number of rows of one pass, and `$rows` lists the possible numbers. With each come
/// two numbers of vectors of a row that are summed at once: one for data in the caches, and one for
/// data in memory. `$shapes` lists the shapes of hops whose factors stay in registers: (rows,
/// columns that are not plain, plain columns, vectors at once).
macro_rules! loops {
    ($features:literal, most $most:literal, rows $(($rows:literal, $near:literal, $far:literal))*,
     shapes $(($r:literal, $s:literal, $plain:literal, $wide:literal))*) => {
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
                // Non-temporal stores are not ordered with other stores. The fence makes the result
                // visible to every thread that learns of its completion.
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
                // A store over data that was just read stalls less when the runs are longer.
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

        /// Computes `R` rows from `P` plain columns and `S` other columns, `W` vectors of each
        /// column at a time. Plain column p has coefficient 1 in the rows r with r % `P` = p, and 0
        /// in all others.
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
                        // SAFETY: `at` is within the task's bytes, and whole steps of these can be
                        // read from each source.
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
                        // SAFETY: the same steps can be written to each target, and with `STREAM`
                        // the targets are aligned.
                        unsafe { if STREAM { stream(target, sums[r][w]) } else { store(target, sums[r][w]) } };
                    }
                }
                at += W * VECTOR * P;
            }
        }

        /// Computes `R` rows from any number of columns, `W` vectors of each at a time.
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
                            // SAFETY: `at` is within the task's bytes, and whole steps of these can
                            // be read from each target.
                            sums[r][w] = unsafe { load(target.cast_const()) };
                        }
                    }
                }
                let mut s = 0;
                while HAS_XOR3 && s + 1 < columns {
                    // SAFETY: both columns are below `columns`, and `bytes` is a multiple of `W *
                    // gap`.
                    let (one, other) = unsafe {
                        (column::<W, FAR>(task, s, at), column::<W, FAR>(task, s + 1, at))
                    };
                    for r in 0..R {
                        let (f, g) = (from_raw(factors[s][r]), from_raw(factors[s + 1][r]));
                        for w in 0..W {
                            sums[r][w] = xor3(sums[r][w], product(f, one[w]), product(g, other[w]));
                        }
                    }
                    s += 2;
                }
                while s < columns {
                    // SAFETY: as above.
                    let data = unsafe { column::<W, FAR>(task, s, at) };
                    for r in 0..R {
                        let factor = from_raw(factors[s][r]);
                        for w in 0..W {
                            sums[r][w] = xor(sums[r][w], product(factor, data[w]));
                        }
                    }
                    s += 1;
                }
                for r in 0..R {
                    for w in 0..W {
                        let target = task.targets[r].wrapping_add(at + w * gap);
                        // SAFETY: the same steps can be written to each target, and with `STREAM`
                        // the targets are aligned.
                        unsafe { if STREAM { stream(target, sums[r][w]) } else { store(target, sums[r][w]) } };
                    }
                }
                at += W * gap;
            }
        }

        /// Loads `W` vectors of a column.
        ///
        /// # Safety
        /// The task must have that column, and at least `W` vectors of it from `at` on.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn column<const W: usize, const FAR: bool>(
            task: &Task<'_>,
            column: usize,
            at: usize,
        ) -> [Vector; W] {
            let mut data = [zero(); W];
            for w in 0..W {
                let source = task.sources[column].wrapping_add(at + w * VECTOR * task.per_buffer);
                if FAR {
                    fetch_ahead(source);
                }
                // SAFETY: the caller guarantees it.
                data[w] = unsafe { load(source) };
            }
            data
        }

        /// Prefetches ahead of `source`. The address may lie past the end: prefetching an unmapped
        /// address has no effect.
        #[target_feature(enable = $features)]
        fn fetch_ahead(source: *const u8) {
            _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(PREFETCH_BYTES).cast());
        }
    };
}

//! A sample to save: a safetensors file that looks like a small transformer with its Adam state.
//!
//! Guarantees: the same size and seed give the same bytes; the file has about the requested size;
//! the memory used does not grow with that size. The values have the magnitudes of trained weights
//! and mean nothing. Format: 8 bytes little-endian header length, JSON header, then the tensors
//! without gaps (<https://github.com/huggingface/safetensors>, "Format").

use std::fmt::Write as _;
use std::io::{self, Write};

use serde::Serialize;

/// The facts about a written sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SampleInfo {
    /// Length of the file in bytes.
    pub bytes: u64,
    /// Number of tensors: weights, first and second moments.
    pub tensors: u64,
    /// Number of parameters of the model.
    pub parameters: u64,
    /// Width of the model.
    pub width: u64,
    /// Number of layers.
    pub layers: u64,
}

/// Bytes of one parameter: weight (bf16), first and second moment (f32 each).
const PARAMETER_BYTES: u64 = 2 + 4 + 4;
const MAX_LAYERS: u64 = 96;
/// Number of bytes generated at a time.
const BUFFER_BYTES: usize = 256 * 1024;

/// The distribution of a tensor's numbers: the random bits to keep and the bits to set, for 8 bytes
/// at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Numbers {
    /// bf16, either sign, 2^-7 to 2^-3.
    Weight,
    /// f32, either sign, 2^-15 to 2^-11.
    FirstMoment,
    /// f32, positive, 2^-31 to 2^-27.
    SecondMoment,
}

impl Numbers {
    fn dtype(self) -> (&'static str, u64) {
        match self {
            Numbers::Weight => ("BF16", 2),
            Numbers::FirstMoment | Numbers::SecondMoment => ("F32", 4),
        }
    }

    /// Returns the masks (keep, set). Mantissa, two bits of the exponent and, except for second
    /// moments, the sign stay random.
    fn masks(self) -> (u64, u64) {
        match self {
            Numbers::Weight => (0x81ff_81ff_81ff_81ff, 0x3c00_3c00_3c00_3c00),
            Numbers::FirstMoment => (0x81ff_ffff_81ff_ffff, 0x3800_0000_3800_0000),
            Numbers::SecondMoment => (0x01ff_ffff_01ff_ffff, 0x3000_0000_3000_0000),
        }
    }
}

#[derive(Debug)]
struct Tensor {
    name: String,
    numbers: Numbers,
    shape: Vec<u64>,
}

impl Tensor {
    fn parameters(&self) -> u64 {
        self.shape.iter().product()
    }

    fn bytes(&self) -> u64 {
        self.parameters() * self.numbers.dtype().1
    }
}

/// Writes a sample of about `target_bytes`: at least a few kilobytes, and within 2 % of the target
/// from 1 MB on. Returns the error of `out` if a write fails.
pub fn write_sample(out: &mut dyn Write, target_bytes: u64, seed: u64) -> io::Result<SampleInfo> {
    let (width, layers, rows) = dimensions(target_bytes / PARAMETER_BYTES);
    let tensors = tensors(width, layers, rows);
    let header = header(&tensors);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    let mut buffer = vec![0; BUFFER_BYTES];
    let (mut bytes, mut counter) = (8 + header.len() as u64, 0);
    for tensor in &tensors {
        let mut left = tensor.bytes();
        bytes += left;
        while left > 0 {
            let length = left.min(BUFFER_BYTES as u64) as usize;
            let Some(part) = buffer.get_mut(..length) else { break };
            counter = fill(part, tensor.numbers, seed, counter);
            out.write_all(part)?;
            left -= length as u64;
        }
    }
    out.flush()?;
    let weights = tensors.iter().filter(|tensor| tensor.numbers == Numbers::Weight);
    Ok(SampleInfo {
        bytes,
        tensors: tensors.len() as u64,
        parameters: weights.map(Tensor::parameters).sum(),
        width,
        layers,
    })
}

/// Returns width, layers and rows of the embedding for about `parameters`: the widest model of at
/// least 4 layers that leaves a quarter of the parameters to the embedding. The embedding takes all
/// that the layers do not use.
fn dimensions(parameters: u64) -> (u64, u64, u64) {
    let layer = |width: u64| 12 * width * width + 2 * width;
    let budget = parameters - parameters / 4;
    let widths = (4..=13).rev().map(|bits| 1u64 << bits);
    let width = widths.into_iter().find(|width| 4 * layer(*width) <= budget).unwrap_or(16);
    let layers = (budget / layer(width)).clamp(1, MAX_LAYERS);
    let rest = parameters.saturating_sub(layers * layer(width) + width);
    (width, layers, (rest / width).max(1))
}

fn tensors(width: u64, layers: u64, rows: u64) -> Vec<Tensor> {
    let mut model = vec![("model.embed_tokens.weight".to_owned(), vec![rows, width])];
    for layer in 0..layers {
        let mut add = |name: &str, shape: Vec<u64>| {
            model.push((format!("model.layers.{layer}.{name}.weight"), shape))
        };
        add("input_layernorm", vec![width]);
        add("self_attn.qkv_proj", vec![3 * width, width]);
        add("self_attn.o_proj", vec![width, width]);
        add("post_attention_layernorm", vec![width]);
        add("mlp.up_proj", vec![4 * width, width]);
        add("mlp.down_proj", vec![width, 4 * width]);
    }
    model.push(("model.norm.weight".to_owned(), vec![width]));
    let states = [
        ("", Numbers::Weight),
        ("optimizer.exp_avg.", Numbers::FirstMoment),
        ("optimizer.exp_avg_sq.", Numbers::SecondMoment),
    ];
    let all = states.into_iter().flat_map(|(prefix, numbers)| {
        model.iter().map(move |(name, shape)| Tensor {
            name: format!("{prefix}{name}"),
            numbers,
            shape: shape.clone(),
        })
    });
    all.collect()
}

/// Returns the JSON header, padded with blanks so that the data begins at a multiple of 8 bytes.
fn header(tensors: &[Tensor]) -> String {
    let mut out =
        String::from("{\"__metadata__\":{\"format\":\"pt\",\"made_by\":\"rapidraid sample\"}");
    let mut start = 0;
    for tensor in tensors {
        let (dtype, end) = (tensor.numbers.dtype().0, start + tensor.bytes());
        // The names need no escapes, and writing to a string does not fail.
        let _ = write!(
            out,
            ",\"{}\":{{\"dtype\":\"{dtype}\",\"shape\":{:?},\"data_offsets\":[{start},{end}]}}",
            tensor.name, tensor.shape
        );
        start = end;
    }
    out.push('}');
    let padded = out.len().next_multiple_of(8);
    out.extend(std::iter::repeat_n(' ', padded - out.len()));
    out
}

/// Fills `out` with the numbers that begin at `counter`. Returns the next counter. Each step of
/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) gives eight bytes; the steps are independent, so
/// that wide registers can compute them.
fn fill(out: &mut [u8], numbers: Numbers, seed: u64, counter: u64) -> u64 {
    let (keep, set) = numbers.masks();
    let word = |counter: u64| {
        let mut z = seed.wrapping_add(counter.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((z ^ (z >> 31)) & keep) | set).to_le_bytes()
    };
    let mut next = counter;
    let (words, rest) = out.as_chunks_mut::<8>();
    for eight in words {
        *eight = word(next);
        next = next.wrapping_add(1);
    }
    if !rest.is_empty() {
        let last = word(next);
        rest.iter_mut().zip(last).for_each(|(slot, byte)| *slot = byte);
        next = next.wrapping_add(1);
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(target_bytes: u64, seed: u64) -> (Vec<u8>, SampleInfo) {
        let mut out = Vec::new();
        let info = write_sample(&mut out, target_bytes, seed).unwrap();
        assert_eq!(info.bytes, out.len() as u64);
        (out, info)
    }

    #[test]
    fn the_header_parses_and_tensors_leave_no_gap() {
        for target in [0, 10_000, 1_000_000, 20_000_000] {
            let (bytes, info) = sample(target, 1);
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            assert_eq!(length % 8, 0);
            let header: serde_json::Map<String, serde_json::Value> =
                serde_json::from_slice(&bytes[8..8 + length]).unwrap();
            let mut spans: Vec<(u64, u64)> = Vec::new();
            for (name, tensor) in header.iter().filter(|(name, _)| *name != "__metadata__") {
                let span = |at: usize| tensor["data_offsets"][at].as_u64().unwrap();
                let shape = tensor["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap());
                let width = if tensor["dtype"] == "BF16" { 2 } else { 4 };
                assert_eq!(span(1) - span(0), width * shape.product::<u64>(), "{name}");
                spans.push((span(0), span(1)));
            }
            spans.sort_unstable();
            assert_eq!(spans.len() as u64, info.tensors);
            let ends = spans.iter().map(|span| span.1);
            let starts =
                spans.iter().skip(1).map(|span| span.0).chain([(bytes.len() - 8 - length) as u64]);
            assert!(spans[0].0 == 0 && ends.eq(starts));
        }
    }

    #[test]
    fn sizes_come_out_as_asked() {
        for target in [1_000_000u64, 64 << 20, 704 << 20, 40 << 30, u64::MAX / 4] {
            let (width, layers, rows) = dimensions(target / PARAMETER_BYTES);
            let model = tensors(width, layers, rows);
            let bytes =
                8 + header(&model).len() as u64 + model.iter().map(Tensor::bytes).sum::<u64>();
            assert!(bytes.abs_diff(target) <= target / 50, "{target}: {bytes}");
            assert!(layers <= MAX_LAYERS);
        }
    }

    #[test]
    fn the_seed_decides_every_byte() {
        let (a, _) = sample(300_000, 7);
        assert_eq!(a, sample(300_000, 7).0);
        assert_ne!(a, sample(300_000, 8).0);
        let hash = blake3::hash(&a).to_hex();
        assert_eq!(&hash[..16], "5ee04c41ab17f55a", "a sample is the same in every release");
    }

    #[test]
    fn numbers_look_like_small_floats() {
        let numbers = |numbers, size: usize| {
            let mut bytes = [0; 4096];
            fill(&mut bytes, numbers, 1, 0);
            let four =
                |c: &[u8]| if size == 2 { [0, 0, c[0], c[1]] } else { [c[0], c[1], c[2], c[3]] };
            bytes.chunks_exact(size).map(|c| f32::from_le_bytes(four(c))).collect::<Vec<_>>()
        };
        let weights = numbers(Numbers::Weight, 2);
        assert!(weights.iter().all(|w| (0.0078..0.125).contains(&w.abs())));
        let mean: f32 = weights.iter().sum::<f32>() / weights.len() as f32;
        assert!(mean.abs() < 0.005, "{mean}");
        assert!(numbers(Numbers::FirstMoment, 4).iter().all(|m| (3e-5..5e-4).contains(&m.abs())));
        assert!(numbers(Numbers::SecondMoment, 4).iter().all(|v| (4e-10..8e-9).contains(v)));
    }

    #[test]
    fn a_full_disk_is_an_error() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        assert_eq!(
            write_sample(&mut Full, 1000, 0).unwrap_err().kind(),
            io::ErrorKind::StorageFull
        );
    }
}

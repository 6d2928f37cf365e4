//! The encoding of plain values of a training state: numbers, texts, flags, and small structures of
//! them.
//!
//! A value is a tag byte and its content; numbers are varints as in the rest of the format
//! (docs/format.md, "Plain values"). No value refers to code, so opening a checkpoint executes
//! none.

use crate::kind::ErrorKind;

/// Maximum nesting depth.
pub const MAX_DEPTH: usize = 64;
/// The longest encoded value in bytes.
pub const MAX_VALUE_BYTES: usize = 256 << 20;

/// A plain value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// No value.
    None,
    /// A boolean.
    Bool(bool),
    /// A signed integer of 64 bits.
    Int(i64),
    /// A longer integer: sign and magnitude, lowest byte first, without leading zeros.
    BigInt {
        /// Whether the integer is below zero.
        is_negative: bool,
        /// The magnitude.
        magnitude: Vec<u8>,
    },
    /// A float of 64 bits. Its bits are preserved exactly.
    Float(u64),
    /// A complex number: the bits of its real and imaginary part.
    Complex(u64, u64),
    /// A text.
    Text(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// A list.
    List(Vec<Value>),
    /// A tuple.
    Tuple(Vec<Value>),
    /// A dictionary: pairs of key and value, in order.
    Dict(Vec<(Value, Value)>),
    /// A value of another type, by the name of the type: `numpy.float32`, `torch.dtype`,
    /// `torch.Size`, `torch.device`.
    Named {
        /// The name of the type.
        kind: String,
        /// The value from which it is made.
        value: Box<Value>,
    },
}

/// The error for bytes that are not a value, or for a value that cannot be encoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ValueError {
    /// The bytes end too early, or continue after the value.
    #[error("a plain value of {len_bytes} bytes ends at byte {at}: use another copy")]
    Length {
        /// The length of the bytes.
        len_bytes: usize,
        /// The offset at which the value ends, or at which more bytes are needed.
        at: usize,
    },
    /// The tag is unknown.
    #[error("a plain value has tag {tag}, which this release does not know: upgrade it")]
    Tag {
        /// The tag.
        tag: u8,
    },
    /// A number, text or integer has an encoding that no writer produces.
    #[error("a plain value has a malformed {what}: use another copy")]
    Malformed {
        /// The name of the malformed part.
        what: &'static str,
    },
    /// The value is nested too deeply or too long.
    #[error(
        "a plain value is {what}: at most {MAX_DEPTH} levels and {MAX_VALUE_BYTES} bytes can be stored; store it as a tensor or as bytes"
    )]
    TooLarge {
        /// The limit that is exceeded, in words.
        what: &'static str,
    },
}

impl ValueError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            ValueError::Length { .. } | ValueError::Malformed { .. } => ErrorKind::Corrupt,
            ValueError::Tag { .. } | ValueError::TooLarge { .. } => ErrorKind::Invalid,
        }
    }
}

fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_number(out, bytes.len() as u64);
    out.extend(bytes);
}

impl Value {
    /// Returns the encoded value. Fails if it is nested too deeply or too long.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ValueError> {
        let mut out = Vec::new();
        self.put(&mut out, 0)?;
        if out.len() > MAX_VALUE_BYTES {
            return Err(ValueError::TooLarge { what: "too long" });
        }
        Ok(out)
    }

    fn put(&self, out: &mut Vec<u8>, depth: usize) -> Result<(), ValueError> {
        if depth >= MAX_DEPTH {
            return Err(ValueError::TooLarge { what: "nested too deep" });
        }
        let put_all = |out: &mut Vec<u8>, values: &[Value]| -> Result<(), ValueError> {
            put_number(out, values.len() as u64);
            values.iter().try_for_each(|value| value.put(out, depth + 1))
        };
        match self {
            Value::None => out.push(0),
            Value::Bool(flag) => out.push(1 + u8::from(*flag)),
            Value::Int(number) => {
                out.push(3);
                // Zigzag encoding, so that small negative numbers are short.
                put_number(out, (*number << 1 ^ *number >> 63) as u64);
            }
            Value::BigInt { is_negative, magnitude } => {
                out.push(4 + u8::from(*is_negative));
                put_bytes(out, magnitude);
            }
            Value::Float(bits) => {
                out.push(6);
                out.extend(bits.to_le_bytes());
            }
            Value::Complex(real, imaginary) => {
                out.push(7);
                out.extend(real.to_le_bytes());
                out.extend(imaginary.to_le_bytes());
            }
            Value::Text(text) => {
                out.push(8);
                put_bytes(out, text.as_bytes());
            }
            Value::Bytes(bytes) => {
                out.push(9);
                put_bytes(out, bytes);
            }
            Value::List(values) => {
                out.push(10);
                put_all(out, values)?;
            }
            Value::Tuple(values) => {
                out.push(11);
                put_all(out, values)?;
            }
            Value::Dict(pairs) => {
                out.push(12);
                put_number(out, pairs.len() as u64);
                for (key, value) in pairs {
                    key.put(out, depth + 1)?;
                    value.put(out, depth + 1)?;
                }
            }
            Value::Named { kind, value } => {
                out.push(13);
                put_bytes(out, kind.as_bytes());
                value.put(out, depth + 1)?;
            }
        }
        Ok(())
    }

    /// Parses the bytes of one value. Every byte must be used.
    pub fn parse(bytes: &[u8]) -> Result<Self, ValueError> {
        let mut reader = Reader { bytes, at: 0 };
        let value = reader.value(0)?;
        match reader.at == bytes.len() {
            true => Ok(value),
            false => Err(reader.ended()),
        }
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn ended(&self) -> ValueError {
        ValueError::Length { len_bytes: self.bytes.len(), at: self.at }
    }

    fn take(&mut self, len: usize) -> Result<&[u8], ValueError> {
        let end = self.at.checked_add(len).ok_or_else(|| self.ended())?;
        let found = self.bytes.get(self.at..end).ok_or_else(|| self.ended())?;
        self.at = end;
        Ok(found)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ValueError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn number(&mut self) -> Result<u64, ValueError> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let [byte] = self.array::<1>()?;
            let part = u64::from(byte & 0x7f);
            if part << shift >> shift != part {
                break;
            }
            number |= part << shift;
            if byte & 0x80 == 0 {
                // Each number has exactly one encoding.
                let is_shortest = shift == 0 || byte != 0;
                return if is_shortest {
                    Ok(number)
                } else {
                    Err(ValueError::Malformed { what: "number" })
                };
            }
        }
        Err(ValueError::Malformed { what: "number" })
    }

    /// Reads a length or count. Each unit takes at least one of the remaining bytes, so a larger
    /// number is refused.
    fn count(&mut self) -> Result<usize, ValueError> {
        let number = self.number()?;
        let left = self.bytes.len() - self.at;
        usize::try_from(number).ok().filter(|count| *count <= left).ok_or_else(|| self.ended())
    }

    fn text(&mut self) -> Result<String, ValueError> {
        let len = self.count()?;
        let text = std::str::from_utf8(self.take(len)?);
        Ok(text.map_err(|_| ValueError::Malformed { what: "text" })?.to_owned())
    }

    fn values(&mut self, depth: usize) -> Result<Vec<Value>, ValueError> {
        // The list grows with the parsed values: a count alone allocates nothing.
        let mut values = Vec::new();
        for _ in 0..self.count()? {
            values.push(self.value(depth + 1)?);
        }
        Ok(values)
    }

    fn value(&mut self, depth: usize) -> Result<Value, ValueError> {
        if depth >= MAX_DEPTH {
            return Err(ValueError::TooLarge { what: "nested too deep" });
        }
        let [tag] = self.array::<1>()?;
        Ok(match tag {
            0 => Value::None,
            1 | 2 => Value::Bool(tag == 2),
            3 => {
                let number = self.number()?;
                Value::Int((number >> 1) as i64 ^ -((number & 1) as i64))
            }
            4 | 5 => {
                let len = self.count()?;
                let magnitude = self.take(len)?.to_vec();
                if magnitude.last().is_none_or(|byte| *byte == 0) {
                    return Err(ValueError::Malformed { what: "integer" });
                }
                Value::BigInt { is_negative: tag == 5, magnitude }
            }
            6 => Value::Float(u64::from_le_bytes(self.array()?)),
            7 => {
                Value::Complex(u64::from_le_bytes(self.array()?), u64::from_le_bytes(self.array()?))
            }
            8 => Value::Text(self.text()?),
            9 => {
                let len = self.count()?;
                Value::Bytes(self.take(len)?.to_vec())
            }
            10 => Value::List(self.values(depth)?),
            11 => Value::Tuple(self.values(depth)?),
            12 => {
                let mut pairs = Vec::new();
                for _ in 0..self.count()? {
                    pairs.push((self.value(depth + 1)?, self.value(depth + 1)?));
                }
                Value::Dict(pairs)
            }
            13 => Value::Named { kind: self.text()?, value: Box::new(self.value(depth + 1)?) },
            tag => return Err(ValueError::Tag { tag }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Value> {
        let text = |text: &str| Value::Text(text.to_owned());
        vec![
            Value::None,
            Value::Bool(false),
            Value::Bool(true),
            Value::Int(0),
            Value::Int(-1),
            Value::Int(i64::MIN),
            Value::Int(i64::MAX),
            Value::BigInt { is_negative: true, magnitude: vec![0, 0, 0, 0, 0, 0, 0, 0, 1] },
            Value::Float(f64::NAN.to_bits()),
            Value::Float((-0.0f64).to_bits()),
            Value::Complex(1, 2),
            text(""),
            text("lr \u{1f600}"),
            Value::Bytes(vec![0; 300]),
            Value::List(vec![]),
            Value::Tuple(vec![Value::Int(3), Value::List(vec![Value::None])]),
            Value::Dict(vec![(
                text("betas"),
                Value::Tuple(vec![Value::Float(0), Value::Float(1)]),
            )]),
            Value::Named { kind: "torch.dtype".into(), value: Box::new(text("float32")) },
        ]
    }

    #[test]
    fn values_come_back_as_they_were() {
        for value in samples() {
            let bytes = value.to_bytes().unwrap();
            assert_eq!(Value::parse(&bytes), Ok(value.clone()));
            assert!(Value::parse(&[&bytes[..], b"x"].concat()).is_err());
            for len in 0..bytes.len() {
                assert!(Value::parse(&bytes[..len]).is_err(), "{value:?} cut to {len}");
            }
        }
    }

    #[test]
    fn damage_is_refused_without_much_memory() {
        for bytes in [
            &[10, 0xff, 0xff, 0xff, 0xff, 0x0f][..],
            &[9, 0x80, 0x00],
            &[3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02],
            &[4, 1, 0],
            &[4, 0],
            &[8, 1, 0xff],
            &[99],
            &[],
        ] {
            assert!(Value::parse(bytes).is_err(), "{bytes:?}");
        }
        let deep = [[10, 1].repeat(100), vec![0]].concat();
        assert!(matches!(Value::parse(&deep), Err(ValueError::TooLarge { .. })));
        let deep = (0..100).fold(Value::None, |inner, _| Value::List(vec![inner]));
        assert!(matches!(deep.to_bytes(), Err(ValueError::TooLarge { .. })));
    }
}

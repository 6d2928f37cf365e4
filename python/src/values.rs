//! Conversion of plain Python values to and from the format's values.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyComplex, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use rapidraid::format::value::{MAX_DEPTH, Value};

/// Returns the value of a Python object, or `None` if it is not a plain value. An instance of a
/// subclass is a plain value only if [`named`] knows its kind: otherwise whatever the subclass adds
/// would be lost.
pub fn from_python(object: &Bound<'_, PyAny>, depth: usize) -> PyResult<Option<Value>> {
    if depth > MAX_DEPTH {
        return Ok(None);
    }
    if object.is_none() {
        return Ok(Some(Value::None));
    }
    if let Ok(flag) = object.cast_exact::<PyBool>() {
        return Ok(Some(Value::Bool(flag.is_true())));
    }
    if object.is_exact_instance_of::<PyInt>() {
        return integer(object).map(Some);
    }
    if let Ok(number) = object.cast_exact::<PyFloat>() {
        return Ok(Some(Value::Float(number.value().to_bits())));
    }
    if let Ok(number) = object.cast_exact::<PyComplex>() {
        let part =
            |name| -> PyResult<u64> { Ok(number.getattr(name)?.extract::<f64>()?.to_bits()) };
        return Ok(Some(Value::Complex(part("real")?, part("imag")?)));
    }
    if let Ok(text) = object.cast_exact::<PyString>() {
        // The format cannot represent a text with lone surrogates.
        return Ok(text.to_cow().ok().map(|text| Value::Text(text.into_owned())));
    }
    if let Ok(bytes) = object.cast_exact::<PyBytes>() {
        return Ok(Some(Value::Bytes(bytes.as_bytes().to_vec())));
    }
    let all = |items: &mut dyn Iterator<Item = Bound<'_, PyAny>>| -> PyResult<Option<Vec<Value>>> {
        let mut values = Vec::new();
        for item in items {
            match from_python(&item, depth + 1)? {
                Some(value) => values.push(value),
                None => return Ok(None),
            }
        }
        Ok(Some(values))
    };
    if let Ok(list) = object.cast_exact::<PyList>() {
        return Ok(all(&mut list.iter())?.map(Value::List));
    }
    if let Ok(tuple) = object.cast_exact::<PyTuple>() {
        return Ok(all(&mut tuple.iter())?.map(Value::Tuple));
    }
    if let Ok(dict) = object.cast_exact::<PyDict>() {
        let mut pairs = Vec::with_capacity(dict.len());
        // The iterator would panic if another thread changed the length of the dict in between.
        for (key, value) in dict.copy()?.iter() {
            match (from_python(&key, depth + 1)?, from_python(&value, depth + 1)?) {
                (Some(key), Some(value)) => pairs.push((key, value)),
                _ => return Ok(None),
            }
        }
        return Ok(Some(Value::Dict(pairs)));
    }
    named(object, depth)
}

/// Converts objects of the kinds that the package knows, from a kind's name and a plain value that
/// represents the object. Returns `None` for other objects.
fn named(object: &Bound<'_, PyAny>, depth: usize) -> PyResult<Option<Value>> {
    let py = object.py();
    let found = py.import("rapidraid._values")?.call_method1("describe", (object,))?;
    if found.is_none() {
        return Ok(None);
    }
    let (kind, value): (String, Bound<'_, PyAny>) = found.extract()?;
    let value = from_python(&value, depth + 1)?;
    Ok(value.map(|value| Value::Named { kind, value: Box::new(value) }))
}

fn integer(object: &Bound<'_, PyAny>) -> PyResult<Value> {
    if let Ok(number) = object.extract::<i64>() {
        return Ok(Value::Int(number));
    }
    let is_negative = object.lt(0)?;
    let magnitude = object.call_method0("__abs__")?;
    let bits: usize = magnitude.call_method0("bit_length")?.extract()?;
    let bytes = magnitude.call_method1("to_bytes", (bits.div_ceil(8), "little"))?;
    Ok(Value::BigInt { is_negative, magnitude: bytes.extract()? })
}

/// Returns the Python object of a value.
pub fn to_python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    let all = |values: &[Value]| -> PyResult<Vec<Bound<'py, PyAny>>> {
        values.iter().map(|value| to_python(py, value)).collect()
    };
    Ok(match value {
        Value::None => py.None().into_bound(py),
        Value::Bool(flag) => PyBool::new(py, *flag).to_owned().into_any(),
        Value::Int(number) => number.into_pyobject(py)?.into_any(),
        Value::BigInt { is_negative, magnitude } => {
            let bytes = PyBytes::new(py, magnitude);
            let int = py.get_type::<PyInt>();
            let number = int.call_method1("from_bytes", (bytes, "little"))?;
            if *is_negative { number.neg()? } else { number }
        }
        Value::Float(bits) => PyFloat::new(py, f64::from_bits(*bits)).into_any(),
        Value::Complex(real, imaginary) => {
            PyComplex::from_doubles(py, f64::from_bits(*real), f64::from_bits(*imaginary))
                .into_any()
        }
        Value::Text(text) => PyString::new(py, text).into_any(),
        Value::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
        Value::List(values) => PyList::new(py, all(values)?)?.into_any(),
        Value::Tuple(values) => PyTuple::new(py, all(values)?)?.into_any(),
        Value::Dict(pairs) => {
            let dict = PyDict::new(py);
            for (key, value) in pairs {
                dict.set_item(to_python(py, key)?, to_python(py, value)?)?;
            }
            dict.into_any()
        }
        Value::Named { kind, value } => {
            let value = to_python(py, value)?;
            py.import("rapidraid._values")?.call_method1("restore", (kind, value))?
        }
    })
}

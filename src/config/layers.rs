//! Settings from four layers: options override the environment, which overrides the file, which
//! overrides the defaults.
//!
//! Every entry of the file is either read or refused with its line, and a value is checked in the
//! same way wherever it comes from. This module does no I/O: the caller passes text, variables and
//! options.

use std::collections::BTreeMap;
use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, SettingPlace};

/// The largest accepted length of a configuration file in bytes.
pub const MAX_FILE_BYTES: usize = 1 << 20;

/// The inputs of a configuration.
#[derive(Debug, Clone, Copy)]
pub struct Sources<'a> {
    /// The path of the file. Messages show it, and relative paths start in its folder.
    pub file: &'a Path,
    /// The text of the file.
    pub text: &'a str,
    /// The environment. Only names that begin with `RAPIDRAID_` are read.
    pub env: &'a BTreeMap<String, String>,
    /// The command-line options, by setting: `code.block` is the key of `--block`.
    pub options: &'a BTreeMap<String, String>,
}

/// A value as it was found. Variables and options have no types, so their values are `Bare`, which
/// every setting can read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Value {
    Text(String),
    Integer(i64),
    Flag(bool),
    List(Vec<String>),
    Bare(String),
    /// A value that no setting accepts, with its description in messages: a float, a date, a table,
    /// a list with items other than text, or an integer that does not fit into 64 bits.
    Other(&'static str),
}

impl Value {
    fn of(value: &DeValue<'_>) -> Self {
        match value {
            DeValue::String(text) => Value::Text(text.clone().into_owned()),
            DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
                .map_or(Value::Other("a number beyond 2^63"), Value::Integer),
            DeValue::Boolean(flag) => Value::Flag(*flag),
            DeValue::Array(items) => items
                .iter()
                .map(|item| item.get_ref().as_str().map(str::to_owned))
                .collect::<Option<Vec<_>>>()
                .map_or(Value::Other("a list of something else than text"), Value::List),
            DeValue::Float(_) => Value::Other("a number with a fraction"),
            DeValue::Datetime(_) => Value::Other("a date"),
            DeValue::Table(_) => Value::Other("a table"),
        }
    }

    fn found(&self) -> String {
        brief(match self {
            Value::Text(text) | Value::Bare(text) => format!("{text:?}"),
            Value::Integer(number) => number.to_string(),
            Value::Flag(flag) => flag.to_string(),
            Value::List(items) => format!("{items:?}"),
            Value::Other(what) => (*what).to_owned(),
        })
    }

    pub(super) fn text(&self) -> Option<&str> {
        match self {
            Value::Text(text) | Value::Bare(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn integer(&self) -> Option<i64> {
        match self {
            Value::Integer(number) => Some(*number),
            Value::Bare(text) => text.trim().parse().ok(),
            _ => None,
        }
    }

    pub(super) fn flag(&self) -> Option<bool> {
        match self {
            Value::Flag(flag) => Some(*flag),
            Value::Bare(text) => text.trim().parse().ok(),
            _ => None,
        }
    }

    /// Returns the items of a list. A bare value is a list separated by white space, because items
    /// may contain commas.
    pub(super) fn list(&self) -> Option<Vec<&str>> {
        match self {
            Value::List(items) => Some(items.iter().map(String::as_str).collect()),
            Value::Bare(text) => Some(text.split_whitespace().collect()),
            _ => None,
        }
    }
}

/// A setting's key, and the name of the table that replaces the key's `*`, if it has one.
type InFile = (String, Option<String>);

/// All values that were found, by setting.
#[derive(Debug)]
pub(super) struct Layers<'a> {
    sources: Sources<'a>,
    file: BTreeMap<InFile, (usize, Value)>,
    tables: BTreeMap<InFile, usize>,
    known: &'static [&'static str],
}

impl<'a> Layers<'a> {
    /// Parses the file's text, and refuses settings in it and options that `reader` does not have.
    /// `known` lists the settings of `reader`. `named` lists those with a `*` for the name of a
    /// table, which exist in files only. `elsewhere` lists the settings of the other kind of file,
    /// for the message. Unknown environment variables are ignored: an orchestrator may set names
    /// like `RAPIDRAID_PORT` for a service that is called like this program.
    pub(super) fn parse(
        sources: Sources<'a>,
        reader: &'static str,
        known: &'static [&'static str],
        named: &'static [&'static str],
        elsewhere: &'static [&'static str],
    ) -> Result<Self, ConfigError> {
        let (path, text) = (sources.file, sources.text);
        if text.len() > MAX_FILE_BYTES {
            let (len_bytes, limit_bytes) = (text.len(), MAX_FILE_BYTES);
            return Err(ConfigError::TooLong { path: path.to_owned(), len_bytes, limit_bytes });
        }
        let place =
            |byte: usize| SettingPlace::File { path: path.to_owned(), line: line_of(text, byte) };
        let table = DeTable::parse(text).map_err(|error| ConfigError::Syntax {
            place: place(error.span().map_or(0, |span| span.start)),
            message: error.message().to_owned(),
        })?;
        let mut flat = Flat { known, named, found: Vec::new(), tables: Vec::new() };
        flat.walk("", None, table.get_ref());
        let Flat { mut found, tables, .. } = flat;
        let unknown = |key: &str, table: Option<&str>, place: SettingPlace| ConfigError::Unknown {
            place,
            key: spelled(key, table),
            reader,
            expected: expected_instead(key, if table.is_some() { named } else { known }, elsewhere),
        };
        let mut file = BTreeMap::new();
        // Settings are checked in the order of the text, so that the error names the first mistake.
        found.sort_by_key(|(_, byte, _)| *byte);
        for (key, byte, value) in found {
            let settings = if key.1.is_some() { named } else { known };
            if !settings.contains(&key.0.as_str()) {
                return Err(unknown(&key.0, key.1.as_deref(), place(byte)));
            }
            file.insert(key, (line_of(text, byte), value));
        }
        let tables = tables.into_iter().map(|(key, byte)| (key, line_of(text, byte))).collect();
        if let Some(key) = sources.options.keys().find(|key| !known.contains(&key.as_str())) {
            return Err(unknown(key, None, SettingPlace::Option(brief(key.clone()))));
        }
        Ok(Self { sources, file, tables, known })
    }

    /// Returns the value with the highest precedence, and its place.
    fn find(&self, key: &'static str) -> Option<(SettingPlace, Value)> {
        debug_assert!(self.known.contains(&key), "{key} is not in the list of settings");
        let variable = variable_of(key);
        if let Some(text) = self.sources.options.get(key) {
            return Some((SettingPlace::Option(key.to_owned()), Value::Bare(text.clone())));
        }
        if let Some(text) = self.sources.env.get(&variable) {
            return Some((SettingPlace::Environment(variable), Value::Bare(text.clone())));
        }
        self.find_in_file(key, None)
    }

    fn find_in_file(&self, key: &str, table: Option<&str>) -> Option<(SettingPlace, Value)> {
        let (line, value) = self.file.get(&(key.to_owned(), table.map(str::to_owned)))?;
        Some((self.line(*line), value.clone()))
    }

    fn line(&self, line: usize) -> SettingPlace {
        SettingPlace::File { path: self.sources.file.to_owned(), line }
    }

    /// Returns the setting, or `None` if no layer sets it. `read` returns `None` for a value that
    /// does not match `expected`; the result is [`ConfigError::Wrong`] then.
    pub(super) fn get<T>(
        &self,
        key: &'static str,
        expected: &'static str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        self.get_in(key, None, expected, read)
    }

    /// Returns the setting of the table `table`, whose name replaces the `*` of `key`.
    pub(super) fn get_in<T>(
        &self,
        key: &'static str,
        table: Option<&str>,
        expected: &'static str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let found = match table {
            None => self.find(key),
            Some(_) => self.find_in_file(key, table),
        };
        let Some((place, value)) = found else { return Ok(None) };
        let key = spelled(key, table);
        let wrong = || ConfigError::Wrong { place, key, found: value.found(), expected };
        read(&value).map(Some).ok_or_else(wrong)
    }

    /// Returns the names of the tables in `section`.
    pub(super) fn tables(&self, section: &str) -> impl Iterator<Item = &str> {
        let ours = self.tables.keys().filter(move |(of, _)| of == section);
        ours.filter_map(|(_, name)| name.as_deref())
    }

    /// Returns the error for a table whose name is not valid.
    pub(super) fn wrong_table(
        &self,
        section: &str,
        name: &str,
        expected: &'static str,
    ) -> ConfigError {
        let line = self.tables.get(&(section.to_owned(), Some(name.to_owned())));
        let found = Value::Text(name.to_owned()).found();
        let place = self.line(line.copied().unwrap_or(1));
        ConfigError::Wrong { place, key: section.to_owned(), found, expected }
    }

    /// Returns the setting, which has no default. A missing setting is an error.
    pub(super) fn need<T>(
        &self,
        key: &'static str,
        expected: &'static str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<T, ConfigError> {
        self.get(key, expected, read)?.ok_or_else(|| ConfigError::Missing {
            path: self.sources.file.to_owned(),
            key,
            expected,
            variable: variable_of(key),
        })
    }

    /// Returns the folder of the file, where relative paths start.
    pub(super) fn folder(&self) -> &'a Path {
        self.sources.file.parent().unwrap_or(Path::new(""))
    }
}

/// Returns the environment variable of a setting: `code.block` is `RAPIDRAID_CODE_BLOCK`.
pub fn variable_of(key: &str) -> String {
    format!("RAPIDRAID_{}", key.to_ascii_uppercase().replace('.', "_"))
}

/// Cuts a text from a configuration to 80 characters, so that a message can quote it.
fn brief(text: String) -> String {
    match text.char_indices().nth(80) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}

/// Returns a key as the file spells it, with the table's name instead of the `*`. Both are cut for
/// messages.
fn spelled(key: &str, table: Option<&str>) -> String {
    let key = brief(key.to_owned());
    table.map_or_else(|| key.clone(), |name| key.replace('*', &brief(format!("{name:?}"))))
}

/// The leaves of a file with dotted keys, and the place of each. A table whose name is not a
/// section is listed as a leaf itself, so that the message names the table and not its content.
struct Flat {
    known: &'static [&'static str],
    named: &'static [&'static str],
    found: Vec<(InFile, usize, Value)>,
    tables: Vec<(InFile, usize)>,
}

impl Flat {
    fn is_section(&self, key: &str) -> bool {
        let below =
            |known: &&str| known.strip_prefix(key).is_some_and(|rest| rest.starts_with('.'));
        self.known.iter().any(below) || self.named.iter().any(below)
    }

    fn walk(&mut self, section: &str, of: Option<&str>, table: &DeTable<'_>) {
        let any = format!("{section}.*");
        let holds_tables = self.is_section(&any);
        for (name, value) in table {
            let (byte, name) = (name.span().start, &**name.get_ref());
            let key =
                if section.is_empty() { name.to_owned() } else { format!("{section}.{name}") };
            match value.get_ref() {
                DeValue::Table(inner) if holds_tables => {
                    self.tables.push(((section.to_owned(), Some(name.to_owned())), byte));
                    self.walk(&any, Some(name), inner);
                }
                DeValue::Table(inner) if self.is_section(&key) => self.walk(&key, of, inner),
                other => {
                    self.found.push(((key, of.map(str::to_owned)), byte, Value::of(other)));
                }
            }
        }
    }
}

/// Returns the line, from 1, that contains byte `byte` of the text.
fn line_of(text: &str, byte: usize) -> usize {
    1 + text.bytes().take(byte).filter(|b| *b == b'\n').count()
}

fn expected_instead(key: &str, known: &[&str], elsewhere: &[&str]) -> String {
    if elsewhere.contains(&key) {
        return "it in the other kind of file only (is this a node's file read as a client's?)"
            .to_owned();
    }
    let near = known.iter().map(|name| (distance(key, name), *name)).min();
    match near {
        Some((far, name)) if far <= 2 => format!("`{name}`?"),
        _ => format!("one of {}", known.join(", ")),
    }
}

/// Returns the edit distance: how many letters must be changed, added or removed to make `a` from
/// `b`. Keys of more than 64 letters count as infinitely far.
fn distance(a: &str, b: &str) -> usize {
    if a.len() > 64 {
        return usize::MAX;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let change = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

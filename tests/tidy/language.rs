//! Rules for words: retired words, type names, the length of lines in pages, and the dialect of comments.

use std::collections::BTreeMap;

use super::source::{code_of, tokens};
use super::{Complaints, Tree, rust};

/// Words that docs/glossary.md replaces. They are looked for in text and in identifiers.
pub const RETIRED: &[&str] = &[
    "wish", "wishes", "entomb", "entombed", "buried", "bury", "tenure", "custody", "strays",
    "twin", "twins",
];

/// Pages that may name retired words: the glossary itself, and what was said of earlier versions.
const HISTORY: &[&str] = &["docs/glossary.md", "docs/changelog.md", "docs/durability-bugs.md"];
/// Folders and pages whose words are checked.
const CHECKED: &[&str] = &["src/", "docs/", "python/", "xtask/", "README.md", "cluster/README.md"];

/// Public types that share their name with another one, each with the reason.
const SHARED_NAMES: &[(&str, &str)] =
    &[("Node", "the daemon (node), its record (format) and a command's options (cli)")];

/// The longest line of a page; tables are wider.
const PAGE_COLUMNS: usize = 120;

/// Words of a text, identifiers cut at underscores and capitals, in lower case.
fn words(line: &str) -> impl Iterator<Item = String> + '_ {
    let mut cut = String::new();
    let mut before = ' ';
    for c in line.chars() {
        if !c.is_alphanumeric() || (c.is_uppercase() && before.is_lowercase()) {
            cut.push(' ');
        }
        if c.is_alphanumeric() {
            cut.push(c.to_ascii_lowercase());
        }
        before = c;
    }
    cut.split_whitespace().map(str::to_owned).collect::<Vec<_>>().into_iter()
}

pub fn no_word_is_retired(tree: &Tree) -> Complaints {
    let mut out = Vec::new();
    let is_checked = |file: &str| {
        CHECKED.iter().any(|place| file.starts_with(place)) && !HISTORY.contains(&file)
    };
    for (file, text) in tree.iter().filter(|(file, _)| is_checked(file)) {
        for (number, line) in text.lines().enumerate() {
            if let Some(word) = words(line).find(|word| RETIRED.contains(&word.as_str())) {
                out.push(format!("{file}:{}: `{word}`: see docs/glossary.md", number + 1));
            }
        }
    }
    out
}

pub fn public_types_have_names_of_their_own(tree: &Tree) -> Complaints {
    let mut found: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (file, text) in rust(tree).filter(|(file, _)| file.starts_with("src/")) {
        let text = text.split("#[cfg(test)]").next().unwrap_or_default();
        let tokens = tokens(&code_of(text));
        for window in tokens.windows(3) {
            let [first, second, third] = window else { continue };
            let is_type = matches!(second.text.as_str(), "struct" | "enum" | "trait" | "type");
            // A macro writes the name behind a `$`.
            if first.text == "pub" && is_type && third.text != "$" {
                found.entry(third.text.clone()).or_default().push(file);
            }
        }
    }
    let is_listed = |name: &str| SHARED_NAMES.iter().any(|(listed, _)| *listed == name);
    let shared = found.into_iter().filter(|(name, files)| files.len() > 1 && !is_listed(name));
    shared.map(|(name, files)| format!("{name}: public types in {}", files.join(", "))).collect()
}

pub fn lines_of_pages_are_short(tree: &Tree) -> Complaints {
    let mut out = Vec::new();
    for (file, text) in tree.iter().filter(|(file, _)| file.ends_with(".md")) {
        for (number, line) in text.lines().enumerate() {
            if line.chars().count() > PAGE_COLUMNS && !line.trim_start().starts_with('|') {
                out.push(format!("{file}:{}: over {PAGE_COLUMNS} columns", number + 1));
            }
        }
    }
    out
}

/// The comments of the code: neighbouring comment lines are one.
fn comments(tree: &Tree) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for (_, text) in rust(tree) {
        let mut is_open = false;
        for line in text.lines() {
            let Some(comment) = line.trim_start().strip_prefix("//") else {
                is_open = false;
                continue;
            };
            let comment = comment.trim_start_matches(['/', '!']).trim_start();
            match out.last_mut() {
                Some(last) if is_open => {
                    last.push(' ');
                    last.push_str(comment);
                }
                _ => out.push(comment.to_owned()),
            }
            is_open = true;
        }
    }
    out
}

pub fn comments_have_a_subject_and_say_what_is_returned(tree: &Tree) -> Complaints {
    let comments = comments(tree);
    let begins = |comment: &&String| {
        let first = comment.split(|c: char| !c.is_alphabetic()).next().unwrap_or_default();
        matches!(first, "What" | "Who" | "Those" | "Whichever")
    };
    let riddles = comments.iter().filter(begins).count();
    let returns = comments.iter().filter(|comment| comment.contains("Returns")).count();
    let mut out = Vec::new();
    if riddles * 200 > comments.len() {
        out.push(format!(
            "{riddles} of {} comments begin with What, Who, Those or Whichever",
            comments.len()
        ));
    }
    if returns * 20 < comments.len() {
        out.push(format!("{returns} of {} comments say `Returns`: too few", comments.len()));
    }
    out
}

/// Words in backticks in the comments of functions that name something outside the program.
const OUTSIDE_WORDS: &[&str] = &[
    "demo",
    "false",
    "flock",
    "float32",
    "getsid",
    "ls",
    "node",
    "rapidraid",
    "rm",
    "save",
    "schema",
    "st_mode",
    "socket_peercred",
    "stage",
    "true",
    "verify",
];

/// A word in backticks in the comment of a function is in the function, most often as a parameter.
/// So a comment does not keep the old name of a parameter that was renamed.
pub fn comments_of_functions_name_what_is_there(tree: &Tree) -> Complaints {
    let mut out = Vec::new();
    for (file, text) in tree.iter().filter(|(file, _)| file.starts_with("src/")) {
        let lines: Vec<&str> = text.lines().collect();
        let mut at = 0;
        while at < lines.len() {
            let is_comment = |line: &&&str| line.trim_start().starts_with("///");
            let comment: Vec<&str> = lines[at..].iter().take_while(is_comment).copied().collect();
            let first = at + comment.len();
            at = first.max(at + 1);
            let rest = lines[first.min(lines.len())..].iter();
            let function: Vec<&str> =
                rest.skip_while(|line| line.trim_start().starts_with("#[")).copied().collect();
            let Some(signature) = function.first().filter(|line| is_function(line)) else {
                continue;
            };
            if comment.is_empty() {
                continue;
            }
            let indent = &signature[..signature.len() - signature.trim_start().len()];
            let close = format!("{indent}}}");
            let is_declared = |at: usize| function[..=at].iter().all(|line| !line.contains('{'));
            let end = (0..function.len())
                .find(|&at| {
                    *function[at] == close || function[at].ends_with(';') && is_declared(at)
                })
                .map_or(function.len(), |end| end + 1);
            let body = function[..end].join("\n");
            let words: Vec<&str> = body.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
            for word in comment.iter().flat_map(|line| quoted_words(line)) {
                let is_name = word.chars().all(|c| c.is_ascii_lowercase() || c == '_');
                let is_known = words.contains(&word);
                if is_name && !is_known && !OUTSIDE_WORDS.contains(&word) {
                    out.push(format!("{file}:{}: no `{word}` in the function below", first + 1));
                }
            }
        }
    }
    out
}

/// Returns the words in backticks, except those of links.
fn quoted_words(line: &str) -> Vec<&str> {
    let parts: Vec<&str> = line.split('`').collect();
    let quoted = parts.windows(2).step_by(2).filter(|pair| !pair[0].ends_with('['));
    quoted.map(|pair| pair[1]).collect()
}

fn is_function(line: &str) -> bool {
    let words = ["pub", "async", "const", "unsafe"];
    let before = line.split("fn ").next().unwrap_or_default();
    line.contains("fn ")
        && before.split_whitespace().all(|word| {
            words.contains(&word) || word.starts_with("pub(") || word == "in" || word.ends_with(')')
        })
}

mod red {
    use super::*;

    fn one(file: &str, text: &str) -> Vec<(String, String)> {
        vec![(file.to_owned(), text.to_owned())]
    }

    #[test]
    fn retired_words() {
        for bad in
            ["the twin of a block", "fn carry_out(twin: u8)", "struct BuriedSaves;", "MAX_WISHES"]
        {
            assert_eq!(no_word_is_retired(&one("src/a.rs", bad)).len(), 1, "{bad}");
        }
        for good in ["twinkle", "wishful", "buriedness"] {
            assert!(no_word_is_retired(&one("src/a.rs", good)).is_empty(), "{good}");
        }
        assert!(no_word_is_retired(&one("docs/glossary.md", "wish")).is_empty());
    }

    #[test]
    fn names_of_types() {
        let two = |a: &str, b: &str| {
            vec![("src/a.rs".to_owned(), a.to_owned()), ("src/b.rs".to_owned(), b.to_owned())]
        };
        let shared = two("pub struct Plan;", "pub enum Plan {}");
        assert_eq!(public_types_have_names_of_their_own(&shared).len(), 1);
        for good in [
            two("pub struct Plan;", "struct Plan;"),
            two("pub struct Node;", "pub struct Node;"),
            two("pub struct Plan;", "#[cfg(test)] mod tests { pub struct Plan; }"),
        ] {
            assert!(public_types_have_names_of_their_own(&good).is_empty());
        }
    }

    #[test]
    fn long_lines_of_pages() {
        let long = "word ".repeat(30);
        assert_eq!(lines_of_pages_are_short(&one("docs/a.md", &long)).len(), 1);
        assert!(lines_of_pages_are_short(&one("docs/a.md", &format!("| {long}"))).is_empty());
        assert!(lines_of_pages_are_short(&one("src/a.rs", &long)).is_empty());
    }

    #[test]
    fn comments_with_old_names() {
        let check = comments_of_functions_name_what_is_there;
        let of = |comment: &str| format!("/// {comment}\nfn a(len: u64) -> u64 {{\n    len\n}}\n");
        assert_eq!(check(&one("src/a.rs", &of("Returns the `size`."))).len(), 1);
        for good in ["Returns `len`.", "Returns `false`.", "Returns [`size`](b)."] {
            assert!(check(&one("src/a.rs", &of(good))).is_empty(), "{good}");
        }
    }

    #[test]
    fn the_dialect() {
        let check = comments_have_a_subject_and_say_what_is_returned;
        let good = "/// Returns the length.\nfn a();\n// A note\n// What follows.\n";
        assert!(check(&one("src/a.rs", good)).is_empty());
        assert_eq!(check(&one("src/a.rs", "/// What is left.\n")).len(), 2);
    }
}

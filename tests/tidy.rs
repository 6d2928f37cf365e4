//! The architecture rules, checked on the text of the repository. Each rule is a function from a
//! tree of files to complaints, so that the tests below can give each rule a tree that breaks it.
//!
//! The rules do not cover code that a macro generates and do not read meaning; reviews do.
#![allow(clippy::disallowed_methods)] // reads the repository itself

#[path = "tidy/language.rs"]
mod language;
#[path = "tidy/source.rs"]
mod source;

use std::path::{Component, Path, PathBuf};

use source::{code_of, modules_named, tokens};

/// The layers from the bottom up. A layer uses those below it; within a layer a module uses those
/// before it; the modules of a sibling group (joined by `+`) do not use each other.
const LAYERS: &[&[&str]] = &[
    &["id", "units", "kind", "clock", "entropy", "budget", "workers", "stage"],
    &["gf"],
    &["code"],
    &["format", "plan", "wire", "seal", "config"],
    &["store+net"],
    &["catalogue", "topology", "placement", "planner", "repair_policy"],
    &["pipeline"],
    &["node+client"],
    &["trainer"],
    &["cli"],
];

/// A folder, and the folders beside it that it may use.
type Service = (&'static str, &'static [&'static str]);

/// The folders of services, and the folders beside them that each may use. A service that is not
/// listed uses none. What several services share stands in files of the folder above.
const SERVICES: &[(&str, &[Service])] = &[
    (
        "src/node",
        &[
            ("storage", &[]),
            ("catalogue_server", &[]),
            ("gateway", &["storage", "catalogue_server"]),
            ("background", &["storage", "catalogue_server", "gateway"]),
            ("rpc", &["storage", "background"]),
        ],
    ),
    (
        "src/pipeline",
        &[("upload", &[]), ("read", &[]), ("executor", &[]), ("coordinator", &["executor"])],
    ),
    ("src/client", &[("save", &[]), ("restore", &[]), ("verify", &["restore"])]),
];

/// Maximum number of lines of a function in the folders of services.
const MAX_FUNCTION_LINES: usize = 64;

/// Functions that may be longer, because they are one table.
const LONG_TABLES: &[&str] = &["dispatch"];

/// Crates that only some files may name (docs/decisions/0001-dependencies.md says why).
const FENCES: &[(&str, &[&str])] = &[
    ("sled", &["src/store/sled_kv.rs"]),
    ("quinn", &["src/net/", "tests/net"]),
    ("rustls", &["src/net/", "tests/net", "cluster/src/pump_tls.rs"]),
    ("rustls_pki_types", &["src/net/", "tests/net", "cluster/src/pump_tls.rs"]),
    ("rcgen", &["src/net/", "tests/net"]),
    ("x509_parser", &["src/net/", "tests/net"]),
    ("reed_solomon_erasure", &["src/gf/", "src/code/", "tests/", "benches/"]),
    ("anyhow", &["src/main.rs", "src/cli/", "benches/kernels/", "cluster/", "xtask/"]),
    ("clap", &["src/main.rs", "src/cli/", "cluster/"]),
    ("indicatif", &["src/cli/", "cluster/"]),
    ("criterion", &["benches/"]),
];

const TOP_LEVEL: &[&str] = &[
    "Cargo.toml",
    "Cargo.lock",
    "LICENSE",
    "README.md",
    "clippy.toml",
    "rustfmt.toml",
    "deny.toml",
    "benches",
    "cluster",
    "docs",
    "python",
    "src",
    "tests",
    "xtask",
];

type Tree = [(String, String)];
type Complaints = Vec<String>;

/// Returns the module's layer, its place in the layer, and its sibling group.
fn layer_of(module: &str) -> Option<(usize, usize)> {
    LAYERS.iter().enumerate().find_map(|(layer, groups)| {
        let place = groups.iter().position(|group| group.split('+').any(|name| name == module));
        place.map(|place| (layer, place))
    })
}

/// Returns the modules from the root down: `src/a/b.rs` and `src/a/b/mod.rs` are [a, b]. Returns
/// `None` for files outside the layers.
fn module_path(file: &str) -> Option<Vec<&str>> {
    let inside = file.strip_prefix("src/")?.strip_suffix(".rs")?;
    let inside = inside.strip_suffix("/mod").unwrap_or(inside);
    let path: Vec<&str> = inside.split('/').collect();
    (!matches!(path[..], ["lib" | "main" | "error"]) && path[0] != "bin").then_some(path)
}

fn rust(tree: &Tree) -> impl Iterator<Item = (&str, &str)> {
    tree.iter().filter(|(file, _)| file.ends_with(".rs")).map(|(f, t)| (f.as_str(), t.as_str()))
}

fn arrows_point_down(tree: &Tree) -> Complaints {
    let mut out = Vec::new();
    for (file, text) in rust(tree) {
        let Some(path) = module_path(file) else { continue };
        let Some(own) = layer_of(path[0]) else {
            out.push(format!("{file}: module `{}` is on no floor of tests/tidy.rs", path[0]));
            continue;
        };
        for (name, line) in modules_named(&tokens(&code_of(text)), path.len()) {
            if name != path[0] && layer_of(&name).is_some_and(|other| other >= own) {
                out.push(format!("{file}:{line}: `{}` may not use `{name}`", path[0]));
            }
        }
    }
    out
}

fn services_use_what_their_table_says(tree: &Tree) -> Complaints {
    let mut out = Vec::new();
    for (file, text) in rust(tree) {
        for (folder, services) in SERVICES {
            let inside = file.strip_prefix(folder).and_then(|rest| rest.strip_prefix('/'));
            let Some((own, _)) = inside.and_then(|rest| rest.split_once('/')) else { continue };
            let Some((_, allowed)) = services.iter().find(|(name, _)| *name == own) else {
                out.push(format!("{file}: the table of services has no {own}"));
                continue;
            };
            let parent = folder.trim_start_matches("src/");
            for (other, _) in services.iter().filter(|(other, _)| *other != own) {
                let path = format!("crate::{parent}::{other}::");
                if code_of(text).contains(&path) && !allowed.contains(other) {
                    out.push(format!("{file}: {own} may not use {other}"));
                }
            }
        }
    }
    out
}

fn functions_of_services_are_short(tree: &Tree) -> Complaints {
    let mut out = Vec::new();
    let is_service = |file: &str| {
        SERVICES.iter().any(|(folder, _)| file.starts_with(folder))
            || file.starts_with("src/store/")
            || file.starts_with("src/catalogue/")
    };
    for (file, text) in rust(tree).filter(|(file, _)| is_service(file)) {
        let lines: Vec<&str> = text.lines().take_while(|line| *line != "#[cfg(test)]").collect();
        for (first, line) in lines.iter().enumerate() {
            let Some((before, after)) = line.split_once("fn ") else { continue };
            let words = ["", "pub", "async", "const", "unsafe"];
            let is_definition = before
                .split_whitespace()
                .all(|word| words.contains(&word) || word.starts_with("pub(") || word == "in");
            let name = after.split(['(', '<']).next().unwrap_or_default();
            if !is_definition || line.ends_with(';') || LONG_TABLES.contains(&name) {
                continue;
            }
            let indent = &line[..line.len() - line.trim_start().len()];
            let end = format!("{indent}}}");
            let length = lines[first..].iter().position(|line| *line == end).unwrap_or(0) + 1;
            if length > MAX_FUNCTION_LINES {
                out.push(format!("{file}: {name} has {length} lines: cut it along its ideas"));
            }
        }
    }
    out
}

fn fenced_crates_stay_inside(tree: &Tree) -> Complaints {
    let mut out = Vec::new();
    for (file, text) in rust(tree) {
        for token in tokens(&code_of(text)) {
            let fence = FENCES.iter().find(|(name, _)| *name == token.text);
            if let Some((name, inside)) = fence
                && !inside.iter().any(|place| file.starts_with(place))
            {
                out.push(format!("{file}:{}: `{name}` is named in {inside:?} only", token.line));
            }
        }
    }
    out
}

fn words_are_allowed(tree: &Tree) -> Complaints {
    let mut out = Vec::new();
    for (file, text) in rust(tree) {
        let tokens = tokens(&code_of(text));
        for (at, token) in tokens.iter().enumerate() {
            let next = |offset: usize| tokens.get(at + offset).map_or("", |t| t.text.as_str());
            // Unsafe code is allowed in the kernels of the field arithmetic, and: in the counting
            // allocator of a test, since nothing else can measure a parser's memory; in the code
            // that benchmarks compare with (loops without checks, and a C library); where memory is
            // shared with another process or with Python.
            let kernel = file.starts_with("src/gf/kernel")
                || file == "src/trainer/mapping.rs"
                || matches!(file, "python/src/buffer.rs" | "python/src/loaded.rs")
                || file.starts_with("benches/kernels/src/raw/")
                || file == "tests/fuzz/memory.rs";
            let prints = matches!(file, "src/main.rs")
                || !file.starts_with("src/")
                || file.starts_with("src/cli/");
            let complaint = match token.text.as_str() {
                "unsafe" if !kernel => {
                    "unsafe code lives under src/gf/kernel, in src/trainer/mapping.rs and at the boundary to Python"
                }
                "todo" | "unimplemented" | "dbg" if next(1) == "!" => {
                    "unfinished or debugging macro"
                }
                "println" | "print" | "eprintln" | "eprint" if next(1) == "!" && !prints => {
                    "only the cli floor prints"
                }
                "ignore" if at >= 2 && tokens[at - 2].text == "#" => {
                    "a test that is not run tests nothing"
                }
                _ => continue,
            };
            out.push(format!("{file}:{}: `{}`: {complaint}", token.line, token.text));
        }
    }
    out
}

/// Finds words that mark unfinished work. They are written in halves because this file is checked
/// too.
fn no_work_is_left_over(tree: &Tree) -> Complaints {
    let marks = [concat!("FIX", "ME"), concat!("TO", "DO"), concat!("XX", "X:")];
    let mut out = Vec::new();
    for (file, text) in tree {
        for (number, line) in text.lines().enumerate() {
            if let Some(mark) = marks.iter().find(|mark| line.contains(**mark)) {
                out.push(format!("{file}:{}: {mark}: do it, or open an issue", number + 1));
            }
        }
    }
    out
}

fn no_file_knows_this_machine(tree: &Tree) -> Complaints {
    let places = [
        concat!("/ho", "me/"),
        concat!("/ro", "ot/"),
        concat!("/Us", "ers/"),
        concat!("/wo", "rk/"),
    ];
    let mut out = Vec::new();
    for (file, text) in tree {
        for (number, line) in text.lines().enumerate() {
            let hit = places.iter().find(|place| {
                line.match_indices(**place).any(|(at, _)| {
                    !line[..at].ends_with(|c: char| {
                        c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | '}' | '~')
                    })
                })
            });
            if let Some(place) = hit {
                out.push(format!("{file}:{}: a path of one machine ({place}...)", number + 1));
            }
        }
    }
    out
}

fn modules_have_names_that_say_something(tree: &Tree) -> Complaints {
    let empty = ["util", "utils", "helper", "helpers", "common", "misc"];
    rust(tree)
        .filter(|(file, _)| {
            file.trim_end_matches(".rs").split('/').any(|part| empty.contains(&part))
        })
        .map(|(file, _)| format!("{file}: a module is named for its one idea"))
        .collect()
}

fn files_hold_one_idea(tree: &Tree) -> Complaints {
    let mut out = Vec::new();
    for (file, text) in rust(tree) {
        let lines = text.lines().count();
        if lines > 600 {
            out.push(format!("{file}: {lines} lines: look for the second idea"));
        }
        if !text.trim_start().starts_with("//!") {
            out.push(format!("{file}: opens without `//!` saying what it is for"));
        }
    }
    out
}

fn links_resolve(tree: &Tree, exists: &dyn Fn(&Path) -> bool) -> Complaints {
    let mut out = Vec::new();
    for (file, text) in tree.iter().filter(|(file, _)| file.ends_with(".md")) {
        for (number, line) in text.lines().enumerate() {
            for (at, _) in line.match_indices("](") {
                let target = line[at + 2..].split([')', ' ']).next().unwrap_or_default();
                let path = target.split('#').next().unwrap_or_default();
                if path.is_empty() || path.contains("://") || path.starts_with("mailto:") {
                    continue;
                }
                let folder = Path::new(file).parent().unwrap_or(Path::new(""));
                if !exists(&normal(&folder.join(path))) {
                    out.push(format!("{file}:{}: no such file: {target}", number + 1));
                }
            }
        }
    }
    out
}

/// Returns the path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(out.pop()),
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

fn manifest_is_strict(tree: &Tree) -> Complaints {
    let manifest = tree.iter().find(|(file, _)| file == "Cargo.toml").map_or("", |(_, text)| text);
    let has = |start: &str| manifest.lines().any(|line| line.starts_with(start));
    let mut out = Vec::new();
    if !has("rust-version = \"") {
        out.push("Cargo.toml: rust-version is missing".to_owned());
    }
    if has("sled") && !has("sled = \"=") && !has("sled = { version = \"=") {
        out.push(
            "Cargo.toml: sled changes its file format between versions: pin it with `=`".to_owned(),
        );
    }
    out
}

fn top_level_is_known(names: &[String]) -> Complaints {
    let known = |name: &str| name.starts_with('.') || name == "target" || TOP_LEVEL.contains(&name);
    let strange = names.iter().filter(|name| !known(name));
    strange.map(|name| format!("{name}: does not belong at the top of the repository")).collect()
}

fn root() -> &'static Path {
    // This package is a folder of the repository.
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Returns all text files of the repository with their relative paths.
fn repository() -> Vec<(String, String)> {
    let mut out = Vec::new();
    let mut folders = vec![root().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let entry = entry.unwrap();
            let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
            if entry.file_type().unwrap().is_dir() {
                if !matches!(
                    name.as_str(),
                    "target" | ".git" | "__pycache__" | ".venv" | "fixtures"
                ) {
                    folders.push(path);
                }
            } else if matches!(
                path.extension().and_then(|e| e.to_str()),
                Some("rs" | "md" | "toml" | "py" | "sh")
            ) || folder.ends_with(".ci")
            {
                let file = path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
                out.push((file, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    out.sort();
    assert!(out.iter().any(|(file, _)| file == "src/lib.rs"), "the walk found no source");
    out
}

fn exists_here(path: &Path) -> bool {
    root().join(path).exists()
}

#[test]
fn the_repository_keeps_the_house_rules() {
    let tree = repository();
    let top = std::fs::read_dir(root()).unwrap();
    let top: Vec<String> = top.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    let complaints: Complaints = [
        arrows_point_down(&tree),
        services_use_what_their_table_says(&tree),
        functions_of_services_are_short(&tree),
        fenced_crates_stay_inside(&tree),
        words_are_allowed(&tree),
        no_work_is_left_over(&tree),
        no_file_knows_this_machine(&tree),
        modules_have_names_that_say_something(&tree),
        files_hold_one_idea(&tree),
        links_resolve(&tree, &exists_here),
        manifest_is_strict(&tree),
        top_level_is_known(&top),
        language::no_word_is_retired(&tree),
        language::public_types_have_names_of_their_own(&tree),
        language::lines_of_pages_are_short(&tree),
        language::comments_have_a_subject_and_say_what_is_returned(&tree),
        language::comments_of_functions_name_what_is_there(&tree),
    ]
    .concat();
    assert!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), complaints.join("\n"));
}

/// Tests of the rules: each gets a tree that breaks it, and one that almost does.
mod red {
    use super::*;

    fn one(file: &str, text: &str) -> Vec<(String, String)> {
        vec![(file.to_owned(), text.to_owned())]
    }

    #[test]
    fn arrows() {
        let bad = [
            ("src/gf/mod.rs", "use crate::code::Layout;"),
            ("src/gf/mod.rs", "use crate::{id, store::Disk};"),
            ("src/net/quic.rs", "fn f() { crate::store::open() }"),
            ("src/store/kv.rs", "use super::super::net;"),
            ("src/id.rs", "use crate::units::MIB;"),
            ("src/wire.rs", "#[cfg(test)] mod tests { use crate::node::Node; }"),
            ("src/stranger.rs", ""),
        ];
        for (file, text) in bad {
            assert_eq!(arrows_point_down(&one(file, text)).len(), 1, "{file}: {text}");
        }
        let good = [
            ("src/units.rs", "use crate::id::Job;"),
            (
                "src/store/kv.rs",
                "use crate::store::disk; use super::disk; use crate::{gf, code::table};",
            ),
            (
                "src/gf/mod.rs",
                "// crate::code\n//! [`crate::store`]\nconst A: &str = \"crate::net\";",
            ),
            ("src/main.rs", "use crate::cli;"),
        ];
        for (file, text) in good {
            assert_eq!(arrows_point_down(&one(file, text)), Complaints::new(), "{file}");
        }
    }

    #[test]
    fn services_and_their_functions() {
        let use_of = |path: &str| format!("//! A.\nuse {path};\n");
        for (file, path, complaints) in [
            ("src/node/storage/a.rs", "crate::node::background::b::C", 1),
            ("src/node/gateway/a.rs", "crate::node::storage::b::C", 0),
            ("src/node/storage/a.rs", "crate::node::storage::b::C", 0),
            ("src/node/services.rs", "crate::node::background::b::C", 0),
            ("src/node/other/a.rs", "crate::id::NodeId", 1),
            ("src/pipeline/executor/a.rs", "crate::pipeline::coordinator::C", 1),
        ] {
            let tree = one(file, &use_of(path));
            assert_eq!(services_use_what_their_table_says(&tree).len(), complaints, "{path}");
        }
        let long = |name: &str, lines: usize| {
            format!("    pub(super) async fn {name}(\n{}    }}\n", "        x;\n".repeat(lines))
        };
        let count =
            |file: &str, text: &str| functions_of_services_are_short(&one(file, text)).len();
        assert_eq!(count("src/node/a.rs", &long("start", MAX_FUNCTION_LINES)), 1);
        assert_eq!(count("src/node/a.rs", &long("start", MAX_FUNCTION_LINES - 2)), 0);
        assert_eq!(count("src/node/a.rs", &long("dispatch", MAX_FUNCTION_LINES)), 0);
        assert_eq!(count("src/cli/a.rs", &long("start", MAX_FUNCTION_LINES)), 0);
    }

    #[test]
    fn fences() {
        for (file, text) in [
            ("src/store/mod.rs", "use sled::Db;"),
            ("src/node/mod.rs", "let e: quinn::Endpoint;"),
            ("src/code/mod.rs", "fn f() -> anyhow::Result<()> {}"),
        ] {
            assert_eq!(fenced_crates_stay_inside(&one(file, text)).len(), 1, "{file}");
        }
        assert!(
            fenced_crates_stay_inside(&one("src/store/sled_kv.rs", "use sled::Db;")).is_empty()
        );
        assert!(fenced_crates_stay_inside(&one("src/id.rs", "// sled")).is_empty());
    }

    #[test]
    fn words() {
        for text in [
            "unsafe { f() }",
            "todo!()",
            "unimplemented!()",
            "dbg!(1)",
            "println!()",
            "#[ignore] fn f() {}",
            "#[ignore = \"slow\"] fn f() {}",
        ] {
            assert_eq!(words_are_allowed(&one("src/id.rs", text)).len(), 1, "{text}");
        }
        assert!(words_are_allowed(&one("src/gf/kernel/avx.rs", "unsafe { f() }")).is_empty());
        let (raw, other) = ("benches/kernels/src/raw/floor.rs", "benches/kernels/src/main.rs");
        assert!(words_are_allowed(&one(raw, "unsafe { f() }")).is_empty());
        assert_eq!(words_are_allowed(&one(other, "unsafe { f() }")).len(), 1);
        assert!(words_are_allowed(&one("src/cli/mod.rs", "println!()")).is_empty());
        assert!(
            words_are_allowed(&one("src/id.rs", "// unsafe todo!()\nlet ignore = dbg;")).is_empty()
        );
    }

    #[test]
    fn leftovers_and_machines() {
        let text = format!("a {} b", concat!("FIX", "ME"));
        assert_eq!(no_work_is_left_over(&one("docs/a.md", &text)).len(), 1);
        let text = format!("see {}alice/x", concat!("/ho", "me/"));
        assert_eq!(no_file_knows_this_machine(&one("docs/a.md", &text)).len(), 1);
        let text = format!("https://example.org{}", concat!("/ho", "me/"));
        assert!(no_file_knows_this_machine(&one("docs/a.md", &text)).is_empty());
    }

    #[test]
    fn names_and_lengths() {
        for file in ["src/util.rs", "src/net/helpers.rs", "tests/common/mod.rs"] {
            assert_eq!(modules_have_names_that_say_something(&one(file, "")).len(), 1, "{file}");
        }
        let long = format!("//! A.\n{}", "\n".repeat(600));
        assert_eq!(files_hold_one_idea(&one("src/id.rs", &long)).len(), 1);
        assert_eq!(files_hold_one_idea(&one("src/id.rs", "// A.\n")).len(), 1);
        assert!(files_hold_one_idea(&one("src/id.rs", "//! A.\n")).is_empty());
    }

    #[test]
    fn links_manifest_and_top_level() {
        let exists = |path: &Path| path == Path::new("docs/a.md") || path == Path::new("README.md");
        let good = "[a](a.md#x) [b](../README.md) [c](https://x.y/z) [d](#e)";
        assert!(links_resolve(&one("docs/b.md", good), &exists).is_empty());
        assert_eq!(links_resolve(&one("docs/b.md", "[a](c.md)"), &exists).len(), 1);
        assert_eq!(manifest_is_strict(&one("Cargo.toml", "sled = \"0.34\"\n")).len(), 2);
        let good = "rust-version = \"1.95\"\nsled = \"=0.34.7\"\n";
        assert!(manifest_is_strict(&one("Cargo.toml", good)).is_empty());
        assert_eq!(top_level_is_known(&["notes.txt".to_owned(), "src".to_owned()]).len(), 1);
    }
}

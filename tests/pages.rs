//! Compares the pages of `docs/` with the source: every call, field, variant and bound is on its
//! page, in order, and the names on the pages exist. Reviews check the rest of the text.
#![allow(clippy::disallowed_methods)] // reads the repository itself

#[path = "tidy/source.rs"]
mod source;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rapidraid::wire::AllowedCaller;
use rapidraid::wire::calls::ALL;
use source::{code_of, tokens};

/// Returns the root of the repository. This package is a folder of it.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn read(path: &str) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the cells of a page's table rows, one list for each row.
fn rows(page: &str) -> Vec<Vec<&str>> {
    let lines = page.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    lines.map(|line| line.split(" | ").map(str::trim).collect()).collect()
}

/// Returns the words in backticks.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// Returns the source without its tests.
fn shipped(path: &str) -> String {
    read(path).split("#[cfg(test)]").next().unwrap_or_default().to_owned()
}

fn is_name(text: &str) -> bool {
    text.chars().next().is_some_and(|first| first.is_alphabetic() || first == '_')
}

/// Returns the fields of a struct, or the variants of an enumeration with their fields, in the
/// order of the source.
fn members(source: &str, name: &str) -> Vec<String> {
    let tokens: Vec<String> = tokens(&code_of(source)).into_iter().map(|t| t.text).collect();
    let is_head = |at: &usize| {
        matches!(tokens[*at].as_str(), "struct" | "enum")
            && tokens.get(at + 1).is_some_and(|t| t == name)
    };
    let head = (0..tokens.len()).find(is_head).unwrap_or_else(|| panic!("no type {name}"));
    let is_enum = tokens[head] == "enum";
    let (mut out, mut depth) = (Vec::new(), 0);
    for at in head + 2..tokens.len() {
        let (before, token, after) =
            (tokens[at - 1].as_str(), &tokens[at], tokens.get(at + 1).map_or("", String::as_str));
        match token.as_str() {
            "{" | "(" | "[" | "<" => depth += 1,
            "}" | ")" | "]" | ">" => depth -= 1,
            "," | ":" | "pub" | "#" => {}
            field if is_name(field) && after == ":" && depth <= 2 => out.push(token.clone()),
            variant if is_enum && depth == 1 && is_name(variant) => {
                if matches!(before, "{" | "," | "]" | "}" | ")") {
                    out.push(token.clone());
                }
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    out
}

/// Asserts that each `type` of `file` has a row on `page` whose words in backticks are its members,
/// in order.
fn types_have_their_rows(page_path: &str, file: &str, types: &[&str]) {
    let (page, source) = (read(page_path), shipped(file));
    for name in types {
        let expected = members(&source, name);
        assert!(!expected.is_empty(), "{file}: {name} has no members");
        let quoted_name = format!("`{name}`");
        let row = rows(&page).into_iter().find_map(|cells| {
            let at = cells.iter().position(|cell| *cell == quoted_name)?;
            // The name is the first cell or follows the kind's number. Anywhere else it is only a
            // mention.
            (at <= 1 && at + 2 == cells.len()).then(|| *cells.last().unwrap())
        });
        let row = row.unwrap_or_else(|| panic!("{page_path} has no row for {name} of {file}"));
        let found: Vec<&str> = quoted(row).into_iter().filter(|word| !word.contains('/')).collect();
        let known = |word: &&str| expected.iter().any(|name| name == word);
        let found: Vec<&str> = found.into_iter().filter(known).collect();
        assert_eq!(found, expected, "{page_path}: {name} is otherwise in {file}");
    }
}

#[test]
fn every_record_is_on_its_page() {
    let records = [
        "ShardRoot",
        "ShardState",
        "Checkpoint",
        "CommitMark",
        "Tombstone",
        "Fence",
        "Leaves",
        "Saved",
        "Writing",
        "Removing",
        "RemoveReason",
        "RingNode",
        "Owner",
        "Run",
        "StripeState",
    ];
    types_have_their_rows("docs/format.md", "src/format/records.rs", &records);
    let of_receipts = ["Receipt", "ReceiptPiece", "PieceForm"];
    types_have_their_rows("docs/format.md", "src/format/receipt.rs", &of_receipts);
    let of_stripes = ["StripeRecord", "StripeFixed", "BlockInfo"];
    types_have_their_rows("docs/format.md", "src/format/stripe_record.rs", &of_stripes);
    let of_the_cluster =
        ["Node", "Members", "Home", "SeenEpoch", "Heard", "CatchUp", "Standing", "Damage"];
    types_have_their_rows("docs/format.md", "src/format/cluster.rs", &of_the_cluster);
    types_have_their_rows("docs/format.md", "src/format/file.rs", &["FileHeader", "Content"]);
    types_have_their_rows("docs/format.md", "src/format/geometry.rs", &["StripeCut"]);
    types_have_their_rows("docs/format.md", "src/catalogue/record_access.rs", &["ArchiveRequest"]);
    types_have_their_rows("docs/format.md", "src/wire/answers.rs", &["ArchiveOptions"]);
    types_have_their_rows("docs/format.md", "src/store/data_folder.rs", &["NodeIdentity"]);
    types_have_their_rows("docs/format.md", "src/store/removed_saves.rs", &["RemovedSaves"]);
    let staged =
        ["InstanceRecord", "OwnerRecord", "StepRecord", "JobRecord", "SaveState", "LaunchRecord"];
    types_have_their_rows("docs/format.md", "src/trainer/daemon/records.rs", &staged);
    types_have_their_rows("docs/format.md", "src/trainer/protocol.rs", &["Place", "Resumed"]);
    types_have_their_rows("docs/format.md", "src/trainer/daemon/core.rs", &["LoadAnswer"]);
    let source = shipped("src/format/records.rs");
    let serialized = source.matches("Serialize, Deserialize)]\npub ").count();
    assert_eq!(serialized, records.len(), "a type of records.rs is in no list of this test");
}

#[test]
fn every_message_is_on_its_page() {
    let answers = [
        "HelloAnswer",
        "RebuildAnswer",
        "InventoryPage",
        "ShardHolding",
        "StripeHolding",
        "BeginSaveAnswer",
        "JoinSaveAnswer",
        "JoinedSave",
        "WriterReport",
        "LaunchClaim",
        "LaunchView",
        "LabelledStep",
        "CompletedShards",
        "OpenSaveView",
        "ArchiveOptions",
        "PlanChoice",
        "ArchiveEvent",
        "StripeReport",
        "HopView",
        "RemoveAnswer",
        "StepView",
        "ListStepsAnswer",
        "StandingAnswer",
        "MarkedSavesPage",
        "MarkedSave",
        "ShowStepAnswer",
        "NodeView",
        "NodeStatusAnswer",
        "RecordName",
        "BlockAdmitted",
        "BlockTrailer",
        "PutBlockAnswer",
        "FileView",
        "SourceView",
        "ExamineAnswer",
        "RecordView",
        "ReadFileAnswer",
        "RegisterAnswer",
        "MoveCatalogueAnswer",
        "DbChecksum",
        "CompareAndSetAnswer",
        "GuardedSetAnswer",
        "DropReplicasAnswer",
    ];
    let orders = [
        "Codec",
        "Order",
        "HopOrder",
        "InputOrder",
        "OutputOrder",
        "PieceProof",
        "HopReport",
        "HopWork",
        "HopTimes",
        "ChunkTimes",
        "RunReport",
    ];
    types_have_their_rows("docs/protocol.md", "src/wire/answers.rs", &answers);
    types_have_their_rows("docs/protocol.md", "src/wire/order.rs", &orders);
    types_have_their_rows("docs/protocol.md", "src/wire/mod.rs", &["NodeAddress", "StreamHeader"]);
    let policy = ["PolicyAnswer", "PolicyRule", "PolicyWait"];
    types_have_their_rows("docs/protocol.md", "src/wire/policy.rs", &policy);
    let repair = [
        "RepairOptions",
        "RepairMode",
        "RepairPlan",
        "RepairEvent",
        "RepairSummary",
        "ShardSurvey",
        "StripeSurvey",
        "RepairStatus",
        "SurveyResult",
        "DegradedStep",
        "RunningRepair",
    ];
    types_have_their_rows("docs/protocol.md", "src/wire/repair.rs", &repair);
    types_have_their_rows("docs/protocol.md", "src/plan/mod.rs", &["Input", "Output"]);
    types_have_their_rows("docs/protocol.md", "src/format/file.rs", &["FileName"]);
    for (file, listed) in
        [("src/wire/answers.rs", answers.len()), ("src/wire/order.rs", orders.len())]
    {
        let serialized = shipped(file).matches("Serialize, Deserialize)]").count();
        let defaults = shipped(file).matches("#[default]").count();
        assert_eq!(serialized, listed, "a type of {file} is in no list ({defaults} defaults)");
    }
}

/// Returns one call from the list in `src/wire/calls.rs`: its fields, then the type of its answer.
fn call_in_source(source: &str, number: u8, name: &str) -> (Vec<String>, String) {
    let head = ["Anyone", "Nodes"].map(|who| format!("    {number} {who} {name} {{"));
    let start = head.iter().find_map(|head| Some(source.find(head)? + head.len()));
    let rest = &source[start.unwrap_or_else(|| panic!("call {name} is not in the list"))..];
    let (fields, rest) = rest.split_once("} -> ").unwrap();
    let answer = rest.split_once(';').unwrap().0.to_owned();
    let fields = fields.lines().map(str::trim).filter(|line| !line.starts_with("//"));
    let fields = fields.filter_map(|line| Some(line.split_once(": ")?.0.to_owned())).collect();
    (fields, answer)
}

#[test]
fn every_call_is_on_its_page() {
    let (page, source) = (read("docs/protocol.md"), read("src/wire/calls.rs"));
    let rows = rows(&page);
    for (number, name, who) in ALL {
        let (fields, answer) = call_in_source(&source, *number, name);
        let row = rows.iter().find(|cells| cells.len() == 6 && cells[1] == format!("`{name}`"));
        let row = row.unwrap_or_else(|| panic!("docs/protocol.md has no row for call {name}"));
        let who = if *who == AllowedCaller::Anyone { "anyone" } else { "nodes" };
        assert_eq!((row[0], row[2]), (number.to_string().as_str(), who), "{name}");
        assert_eq!(quoted(row[3]), fields, "request of {name}");
        let expected = if answer == "()" { "-".to_owned() } else { format!("`{answer}`") };
        assert_eq!(row[4], expected, "answer of {name}");
    }
    let listed = rows.iter().filter(|cells| cells.len() == 6 && cells[0].parse::<u8>().is_ok());
    assert_eq!(listed.count(), ALL.len(), "docs/protocol.md lists a call that is gone");
}

/// Returns all files under `folder` with the ending, as paths from the root of the repository.
fn files(folder: &str, ending: &str) -> Vec<String> {
    let root = root();
    let (mut out, mut folders) = (Vec::new(), vec![root.join(folder)]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.to_str().unwrap().ends_with(ending) {
                out.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    out.sort();
    out
}

/// Constants that are not bounds: units, numbers of the format, and values that other pages name.
const NO_BOUNDS: [&str; 32] = [
    "KIB",
    "MIB",
    "HEAD_BYTES",
    "CHECKSUM_BYTES",
    "ENVELOPE_BYTES",
    "HASH_BYTES",
    "TRAILER_BYTES",
    "STRIPE_KEY_BYTES",
    "DIRECT_ALIGN_BYTES",
    "BLOCK_ALIGN_BYTES",
    "UNIT_BYTES",
    "TRAILER_VERSION",
    "ABANDONED",
    "DEFAULT_PORT",
    "EXTENT_ALIGN_BYTES",
    "FOOTER_BYTES",
    "FOOTER_VERSION",
    "HAS_HASHES",
    "SEALED_BYTES",
    "SIGN_BIT",
    "STAT_BLOCK_BYTES",
    "HEADER_BYTES",
    "STATE_AT",
    "FILL_AT",
    "HASHED_FROM",
    "HASH_AT",
    "USED_BYTES",
    "VERSION",
    "OLDEST",
    "KERNEL_DESCRIPTORS",
    "READ_BYTES_OF_A_SOCKET",
    "HEAD",
];

/// Modules whose constants bound a running process.
const BOUNDED: [&str; 15] = [
    "budget",
    "catalogue",
    "client",
    "config",
    "format",
    "net",
    "node",
    "pipeline",
    "placement",
    "plan",
    "repair_policy",
    "store",
    "trainer",
    "units",
    "wire",
];

/// Returns each `const NAME: TYPE = VALUE;` at the top level of a file as (name, value).
fn constants(source: &str) -> Vec<(String, String)> {
    let mut out = Vec::new();
    for (at, _) in source.match_indices("const ") {
        let line_start = source[..at].rfind('\n').map_or(0, |end| end + 1);
        let before = &source[line_start..at];
        if !(before.is_empty() || before.starts_with("pub")) {
            continue;
        }
        let statement = source[at + 6..].split(';').next().unwrap_or_default();
        let Some((head, value)) = statement.split_once('=') else { continue };
        let Some((name, kind)) = head.split_once(':') else { continue };
        if !matches!(kind.trim(), "usize" | "u16" | "u32" | "u64" | "Duration") {
            continue;
        }
        let value = value.split_whitespace().collect::<Vec<_>>().join(" ");
        let value = match value.strip_suffix(')').and_then(|value| value.split_once('(')) {
            Some(("Duration::from_secs", number)) => format!("{number} s"),
            Some(("Duration::from_millis", number)) => format!("{number} ms"),
            _ => value,
        };
        out.push((name.to_owned(), value));
    }
    out
}

#[test]
fn every_bound_is_on_its_page() {
    let page = read("docs/limits.md");
    let on_page: BTreeSet<String> = page
        .lines()
        .filter(|line| line.starts_with("| `src/"))
        .map(|line| line.splitn(5, '|').take(4).collect::<Vec<_>>().join("|").trim().to_owned())
        .collect();
    let mut in_source = BTreeSet::new();
    for file in files("src", ".rs") {
        let module = file["src/".len()..].split(['/', '.']).next().unwrap_or_default();
        if !BOUNDED.contains(&module) || file.contains("memory") || file.ends_with("/tests.rs") {
            continue;
        }
        for (name, value) in constants(&shipped(&file)) {
            if !NO_BOUNDS.contains(&name.as_str()) {
                in_source.insert(format!("| `{file}` | `{name}` | `{value}`"));
            }
        }
    }
    assert!(in_source.len() > 50, "the constants were not found");
    let missing: Vec<_> = in_source.difference(&on_page).collect();
    let stale: Vec<_> = on_page.difference(&in_source).collect();
    assert!(
        missing.is_empty() && stale.is_empty(),
        "docs/limits.md: add {missing:#?} with what each bounds, and remove {stale:#?}"
    );
}

/// The table of the services of a node names, for each service of a row, the services that it
/// holds.
#[test]
fn the_table_of_services_is_that_of_the_source() {
    let page = read("docs/architecture.md");
    let rows = page.split("| service | calls |").nth(1).expect("the page has the table");
    let rows: Vec<[BTreeSet<String>; 2]> = rows
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let mut cells = line.split('|').skip(1);
            let mut cell = || quoted(cells.next().unwrap_or_default());
            [cell(), cell()].map(|names| names.into_iter().map(str::to_owned).collect())
        })
        .collect();
    let listed: BTreeSet<String> = rows.iter().flat_map(|[services, _]| services.clone()).collect();
    let source: String = files("src/node", ".rs").iter().map(|file| code_of(&read(file))).collect();
    let held = |service: &str| -> BTreeSet<String> {
        let start = source.find(&format!("struct {service} {{"));
        let body = &source[start.unwrap_or_else(|| panic!("{service} is not in the source"))..];
        let body = &body[..body.find("\n}").expect("a struct ends")];
        let held = body.split("Arc<").skip(1).filter_map(|rest| rest.split('>').next());
        held.map(str::to_owned).collect()
    };
    let missing: Vec<String> = held("Services").difference(&listed).cloned().collect();
    assert!(missing.is_empty(), "the table of services lacks {missing:?}");
    for [services, calls] in &rows {
        if services.contains("RpcServer") {
            continue;
        }
        for service in services {
            let found = held(service).into_iter().filter(|name| listed.contains(name));
            assert_eq!(*calls, found.collect::<BTreeSet<String>>(), "{service}");
        }
    }
}

/// Paths and names in backticks on the pages that describe the code exist. For `a::b`, `src/`
/// defines both `a` and `b`.
#[test]
fn what_the_pages_name_exists() {
    let root = root();
    let mut defined: BTreeSet<String> = BTreeSet::new();
    for file in files("src", ".rs") {
        let path = file.trim_end_matches(".rs").trim_end_matches("/mod");
        defined.extend(path.split('/').skip(1).map(str::to_owned));
        let tokens: Vec<String> =
            tokens(&code_of(&read(&file))).into_iter().map(|token| token.text).collect();
        for pair in tokens.windows(2) {
            let defines = ["fn", "struct", "enum", "trait", "const", "type", "mod"]
                .contains(&pair[0].as_str());
            // Fields and variants are defined without a keyword.
            let member = is_name(&pair[0]) && [":", ",", "{", "("].contains(&pair[1].as_str());
            defined.extend(defines.then(|| pair[1].clone()));
            defined.extend(member.then(|| pair[0].clone()));
        }
    }
    let pages = [
        "architecture",
        "protocol",
        "format",
        "paper",
        "glossary",
        "limits",
        "testing",
        "semantics",
        "staging",
    ];
    let mut unknown = Vec::new();
    for page in pages.map(|page| format!("docs/{page}.md")) {
        let text = read(&page);
        for word in text.lines().flat_map(quoted) {
            let is_path =
                ["src/", "tests/", "docs/", "benches/"].iter().any(|p| word.starts_with(p));
            if is_path && !word.contains('*') {
                if !root.join(word).exists() {
                    unknown.push(format!("{page}: {word}"));
                }
            } else if word.contains("::") {
                let call = word.split('(').next().unwrap_or_default();
                let mut names = call.split("::");
                if !names.all(|name| defined.contains(name)) {
                    unknown.push(format!("{page}: {word}"));
                }
            }
        }
    }
    assert!(unknown.is_empty(), "named on a page and not there: {unknown:#?}");
}

#[test]
fn members_are_read_from_the_source() {
    let source = "/// A.\npub struct A {\n /// b: c\n pub b: Vec<(u8, u8)>,\n pub c: [u8; 4],\n}\n\
        #[derive(Debug)]\npub enum E { #[default]\n A, B { x: u8, y: Option<u8> }, C(D), F(Option<(A, u8)>), }";
    assert_eq!(members(source, "A"), ["b", "c"]);
    assert_eq!(members(source, "E"), ["A", "B", "x", "y", "C", "F"]);
    let bounds = "const A: usize = 4 << 20;\n    const B: u64 = 1;\npub(super) const C: Duration =\n    Duration::from_secs(5);\nconst D: &str = \"x\";";
    let expected = [("A", "4 << 20"), ("C", "5 s")].map(|(a, b)| (a.to_owned(), b.to_owned()));
    assert_eq!(constants(bounds), expected);
}

//! `code`: lists, shows, searches and certifies erasure codes.

use serde_json::{Map, Value};

use super::args::CodeCommand;
use super::picture::{self, Stop, Style};
use super::printer::{CommandFailure, CommandOutput};
use super::table::{Paint, Table, Tint};
use super::{Front, Outcome, files};
use crate::code::show::{CodeReport, MAX_REPORT_BYTES, certify};
use crate::code::{ChainCode, Code, CodeError, search, table};

/// Runs the command `code`.
pub fn run(front: &mut Front, command: CodeCommand) -> Outcome {
    let failed = |error: CodeError| CommandFailure::of(error.kind(), &error);
    let style = Style::of_env(&front.env, front.printer.paint());
    let one = |code: ChainCode, title: &str| -> Outcome {
        let report = CodeReport::of(&Code::Chain(code)).map_err(failed)?;
        Ok(Box::new(One { title: title.to_owned(), report, style }))
    };
    match command {
        CodeCommand::List => {
            let report = |code: &ChainCode| CodeReport::of(&Code::Chain(code.clone()));
            let reports =
                table::all().iter().map(report).collect::<Result<_, _>>().map_err(failed)?;
            Ok(Box::new(All(reports)))
        }
        CodeCommand::Show { shape, paper_order: true } => {
            one(ChainCode::paper(shape.n, shape.k).map_err(failed)?, "in the order of the paper")
        }
        CodeCommand::Show { shape, paper_order: false } => match table::find(shape.n, shape.k) {
            Some(code) => one(code.clone(), "certified"),
            None => {
                // Parameters that no code can have are a different failure from a code that is not
                // known yet.
                crate::code::Layout::new(shape.n, shape.k).map_err(failed)?;
                let message = format!("there is no certified code ({},{}) here", shape.n, shape.k);
                Err(CommandFailure::new(crate::kind::ErrorKind::NotFound, message).with_hint(format!(
                    "`rapidraid code list` shows what there is, `rapidraid code search {},{}` looks for one",
                    shape.n, shape.k
                )))
            }
        },
        CodeCommand::Search { shape, seed } => one(
            search::mds(shape.n, shape.k, seed).map_err(|error| match error {
                error @ CodeError::NotFound { n, k, .. } => {
                    let next = seed.wrapping_add(1);
                    let hint =
                        format!("`rapidraid code search {n},{k} --seed {next}` tries another one");
                    failed(error).with_hint(hint)
                }
                other => failed(other),
            })?,
            &format!("found with seed {seed}"),
        ),
        CodeCommand::Certify { file } => {
            let text = files::read_text(&file, MAX_REPORT_BYTES)?;
            let (_, report) = certify(&text).map_err(failed)?;
            let title = "counted again: all that the document claims is so".to_owned();
            Ok(Box::new(One { title, report, style }))
        }
    }
}

fn document(report: &CodeReport) -> Map<String, Value> {
    let value = serde_json::to_value(report).unwrap_or_default();
    value.as_object().cloned().unwrap_or_default()
}

struct All(Vec<CodeReport>);

impl CommandOutput for All {
    fn json(&self) -> Map<String, Value> {
        let codes = self.0.iter().map(|report| Value::Object(document(report))).collect();
        Map::from_iter([("codes".to_owned(), Value::Array(codes))])
    }

    fn text(&self, paint: Paint) -> String {
        let headings = [
            "CODE",
            "ID",
            ">STORED",
            ">LOSSES SURVIVED",
            ">SUBSETS",
            ">DEPENDENT",
            ">IN PAPER'S ORDER",
        ];
        let mut table = Table::new(&headings);
        for code in &self.0 {
            let order: Vec<usize> = (0..code.n).collect();
            let layout = crate::code::Layout::new(code.n, code.k);
            let paper = layout.and_then(|layout| crate::code::subsets::natural(layout, &order));
            table.row([
                format!("({},{})", code.n, code.k),
                code.id.clone(),
                format!("{:.2}x", code.n as f64 / code.k as f64),
                survived(code),
                code.subsets.to_string(),
                code.dependent_subsets.to_string(),
                paper.map_or_else(|_| String::new(), |count| count.to_string()),
            ]);
        }
        let counted = "Counted now, over all k-subsets of pieces. A subset is dependent when the blocks cannot be computed from it.\n";
        format!("{}\n{}", table.render(paint), paint.tint(Tint::Dim, counted))
    }
}

/// Returns the losses that the code survives as text: any n-k losses if no subset is dependent.
fn survived(code: &CodeReport) -> String {
    match code.dependent_subsets {
        0 => format!("any {}", code.n.saturating_sub(code.k)),
        _ => format!("not any {}", code.n.saturating_sub(code.k)),
    }
}

struct One {
    title: String,
    report: CodeReport,
    style: Style,
}

impl CommandOutput for One {
    fn json(&self) -> Map<String, Value> {
        document(&self.report)
    }

    fn text(&self, paint: Paint) -> String {
        let code = &self.report;
        let title = format!("{} ({},{})", code.kind, code.n, code.k);
        let mut out =
            format!("{} {}, id {}\n\n", paint.tint(Tint::Bold, &title), self.title, code.id);
        let stops: Vec<Stop> = code
            .order
            .iter()
            .zip(&code.blocks)
            .enumerate()
            .map(|(hop, (position, blocks))| Stop {
                node: format!("node {position}"),
                blocks: blocks.iter().map(|block| format!("o{block}")).collect(),
                piece: format!("c{}", hop + 1),
            })
            .collect();
        out.push_str(&picture::chain(&stops, self.style));
        out.push('\n');
        let count =
            |count: Option<usize>| count.map_or_else(|| "none".to_owned(), |c| c.to_string());
        let facts = [
            ("field", format!("GF(2^8), polynomial {:#x}", code.polynomial)),
            ("stored", format!("{:.3}x", code.n as f64 / code.k as f64)),
            ("losses survived", survived(code)),
            (
                "dependent subsets",
                format!(
                    "{} of {}; {} for every choice of coefficients",
                    code.dependent_subsets, code.subsets, code.natural_dependent_subsets
                ),
            ),
            (
                "first k pieces",
                if code.walkable {
                    format!(
                        "rebuild the blocks hop by hop: {} multiplications a byte (dense matrix: {})",
                        count(code.multiplications_first_k),
                        count(code.multiplications_dense)
                    )
                } else {
                    format!(
                        "need the matrix: {} multiplications a byte",
                        count(code.multiplications_dense)
                    )
                },
            ),
        ];
        for (name, fact) in facts {
            out.push_str(&format!("{name:<18} {fact}\n"));
        }
        let mut costs =
            Table::new(&[">MISSING", ">MULTIPLICATIONS", ">COST", ">OF THE MATRIX", "RUNS AS"]);
        for of in &code.reconstructions {
            costs.row([
                of.missing.to_string(),
                of.multiplications.to_string(),
                of.cost.to_string(),
                of.dense_cost.to_string(),
                if of.sparse { "steps" } else { "matrix" }.to_owned(),
            ]);
        }
        out.push_str("\ncomputing all blocks when the first pieces are missing (cost in products of a vector and a constant)\n");
        out.push_str(&costs.render(paint));
        let list = |coefs: &[u8]| {
            coefs.iter().map(|coef| format!("{coef:3}")).collect::<Vec<_>>().join(" ")
        };
        let mut table = Table::new(&[">HOP", ">NODE", "BLOCKS", "PSI (FORWARDED)", "XI (STORED)"]);
        for (hop, ((position, blocks), (psi, xi))) in
            code.order.iter().zip(&code.blocks).zip(code.psi.iter().zip(&code.xi)).enumerate()
        {
            let blocks: Vec<String> = blocks.iter().map(|block| format!("o{block}")).collect();
            let tail = hop + 1 == code.order.len();
            let psi = if tail { "-".to_owned() } else { list(psi) };
            table.row([
                (hop + 1).to_string(),
                position.to_string(),
                blocks.join(" "),
                psi,
                list(xi),
            ]);
        }
        format!("{out}\n{}", table.render(paint))
    }
}

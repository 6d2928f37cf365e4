//! Codes as data for users and other programs: the report behind `code show`, and the check of such
//! a report behind `code certify`. Positions and blocks count from 1 here, as in the paper, and
//! nowhere else in `code`.

use serde::{Deserialize, Serialize};

use super::{ChainCode, Code, CodeError, Layout, MAX_PIECES, reconstruct, search, subsets};
use crate::gf::field;

/// The longest report that is read, in bytes. A report of 32 pieces takes about 30 KB.
pub const MAX_REPORT_BYTES: usize = 1 << 20;

const SCHEMA: u32 = 1;
const FIELD: &str = "gf8";
/// The field of a report that holds estimates, which are not claims about the code.
const ESTIMATES: &str = "reconstructions";

/// A complete description of a code, including the counts of its dependent subsets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CodeReport {
    /// The version of this structure: 1.
    pub schema: u32,
    /// `chain` or `rs`.
    pub kind: &'static str,
    /// The code's id, 16 hexadecimal digits.
    pub id: String,
    /// The number of pieces.
    pub n: usize,
    /// The number of source blocks.
    pub k: usize,
    /// The field: `gf8` for GF(2^8).
    pub field: &'static str,
    /// The field's polynomial: 285.
    pub polynomial: u16,
    /// The position of each hop (for `rs`, of each piece), from 1.
    pub order: Vec<usize>,
    /// The blocks that each hop reads, from 1; empty for `rs`.
    pub blocks: Vec<Vec<usize>>,
    /// The coefficients of the forwarded stream, per hop and block; zeros at the tail.
    pub psi: Vec<Vec<u8>>,
    /// The coefficients of the stored piece, per hop and block.
    pub xi: Vec<Vec<u8>>,
    /// A row of k coefficients per piece, in the order of the chain.
    pub generator: Vec<Vec<u8>>,
    /// The number of subsets of k pieces.
    pub subsets: u64,
    /// The number of subsets of k pieces from which the blocks cannot be reconstructed.
    pub dependent_subsets: u64,
    /// The number of dependent subsets that no choice of coefficients avoids.
    pub natural_dependent_subsets: u64,
    /// Whether each of the first k hops brings one new block.
    pub walkable: bool,
    /// The number of multiplications to reconstruct all blocks from the first k pieces, if these
    /// suffice.
    pub multiplications_first_k: Option<usize>,
    /// The number of multiplications by the dense matrix, factors 0 and 1 not counted.
    pub multiplications_dense: Option<usize>,
    /// The cost of reconstructing all blocks when the first pieces are missing: one entry per
    /// number of missing pieces, from 0 to n-k, if the next k pieces suffice. These are estimates, not
    /// claims about the code.
    pub reconstructions: Vec<Reconstruction>,
}

/// The cost of reconstructing all blocks, according to the cost model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reconstruction {
    /// The number of missing pieces, counted from the first piece. The next pieces take their
    /// place.
    pub missing: usize,
    /// The number of multiplications in the steps of the program that reconstructs the blocks, also
    /// if the program executes the matrix instead.
    pub multiplications: usize,
    /// The cost of the program in products of a vector and a constant, for k vectors.
    pub cost: usize,
    /// The cost of the dense matrix, in the unit of `cost`.
    pub dense_cost: usize,
    /// Whether the program executes its steps; otherwise it executes the matrix.
    pub sparse: bool,
}

impl Reconstruction {
    fn all(code: &Code) -> Vec<Self> {
        let all_blocks: Vec<usize> = (0..code.k()).collect();
        let of = |missing| {
            let available: Vec<usize> = (missing..code.n()).take(code.k()).collect();
            let program = reconstruct(code, &available, &all_blocks).ok()?;
            let (cost, dense_cost) = program.costs();
            let (multiplications, sparse) = (program.multiplications(), program.is_sparse());
            Some(Self { missing, multiplications, cost, dense_cost, sparse })
        };
        (0..=code.n() - code.k()).filter_map(of).collect()
    }
}

impl CodeReport {
    /// Returns the report on `code`. Counting takes milliseconds for (16,11).
    pub fn of(code: &Code) -> Result<Self, CodeError> {
        let (n, k) = (code.n(), code.k());
        let all_blocks: Vec<usize> = (0..k).collect();
        let first_k = code.generator().select(&all_blocks)?.inverse().ok();
        let program = reconstruct(code, &all_blocks, &all_blocks).ok();
        let mut report = Self {
            schema: SCHEMA,
            kind: code.name(),
            id: code.id().to_string(),
            n,
            k,
            field: FIELD,
            polynomial: field::POLYNOMIAL,
            order: (1..=n).collect(),
            blocks: Vec::new(),
            psi: Vec::new(),
            xi: Vec::new(),
            generator: code.generator().iter().map(<[u8]>::to_vec).collect(),
            subsets: subsets::total(n, k),
            dependent_subsets: subsets::dependent(code.generator())?,
            natural_dependent_subsets: 0,
            walkable: false,
            multiplications_first_k: program.map(|program| program.multiplications()),
            multiplications_dense: first_k
                .map(|inverse| inverse.iter().flatten().filter(|&&coef| coef > 1).count()),
            reconstructions: Reconstruction::all(code),
        };
        if let Code::Chain(chain) = code {
            let blocks = |hop| chain.blocks_of_hop(hop).map(|block| block + 1).collect();
            report.order = chain.order().iter().map(|position| position + 1).collect();
            report.blocks = (0..n).map(blocks).collect();
            report.psi = chain.psi().to_vec();
            report.xi = chain.xi().to_vec();
            report.natural_dependent_subsets = subsets::natural(chain.layout(), chain.order())?;
            report.walkable = search::is_walkable(chain.layout(), chain.order());
        }
        Ok(report)
    }
}

/// The parts that are read of a foreign report: the definition of the code, and optional claims
/// about it.
#[derive(Deserialize)]
struct Claims {
    schema: u32,
    n: usize,
    k: usize,
    field: String,
    polynomial: u16,
    order: Vec<usize>,
    psi: Vec<Vec<u8>>,
    xi: Vec<Vec<u8>>,
    #[serde(flatten)]
    others: serde_json::Map<String, serde_json::Value>,
}

impl Claims {
    fn read(text: &str) -> Result<Self, CodeError> {
        let wrong = |reason: String| CodeError::Report { reason };
        if text.len() > MAX_REPORT_BYTES {
            return Err(wrong(format!("{} bytes are more than {MAX_REPORT_BYTES}", text.len())));
        }
        let claims: Self = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        if claims.schema != SCHEMA {
            return Err(wrong(format!("its schema is {}", claims.schema)));
        }
        if claims.field != FIELD || claims.polynomial != field::POLYNOMIAL {
            return Err(wrong(format!("only field {FIELD} of polynomial 285 is supported")));
        }
        if claims.n > MAX_PIECES {
            return Err(wrong(format!("n = {} is more than {MAX_PIECES}", claims.n)));
        }
        Ok(claims)
    }

    fn code(&self) -> Result<ChainCode, CodeError> {
        let layout = Layout::new(self.n, self.k)?;
        let order: Option<Vec<usize>> = self
            .order
            .iter()
            .take(MAX_PIECES + 1)
            .map(|position| position.checked_sub(1))
            .collect();
        let reason = || "positions count from 1".to_owned();
        let order = order.ok_or_else(|| CodeError::Report { reason: reason() })?;
        ChainCode::new(layout, order, self.psi.clone(), self.xi.clone())
    }
}

/// Returns the chain code that a report defines. Further claims of the report are not checked: see
/// [`certify`].
pub fn parse(text: &str) -> Result<ChainCode, CodeError> {
    Claims::read(text)?.code()
}

/// Makes the code that a report defines, counts again, and compares each claim of the report with
/// the counted value. Claims are the fields of [`CodeReport`] except the estimates. Returns the code
/// and the confirmed report, or [`CodeError::Claim`] for a claim that is wrong. The caller decides
/// whether the confirmed numbers are good enough.
pub fn certify(text: &str) -> Result<(ChainCode, CodeReport), CodeError> {
    let claims = Claims::read(text)?;
    let chain = claims.code()?;
    let code = Code::Chain(chain);
    let report = CodeReport::of(&code)?;
    let defect = CodeError::Defect { what: "a code report" };
    let Ok(serde_json::Value::Object(found)) = serde_json::to_value(&report) else {
        return Err(defect);
    };
    let others = claims.others.iter().filter(|(name, _)| *name != ESTIMATES);
    let brief = |value: &serde_json::Value| value.to_string().chars().take(128).collect();
    for (name, claimed) in others {
        match found.get_key_value(name) {
            Some((_, actual)) if actual != claimed => {
                let (claimed, actual) = (brief(claimed), brief(actual));
                return Err(CodeError::Claim { field: name.clone(), claimed, actual });
            }
            _ => {} // equal, or not a field of a report
        }
    }
    match code {
        Code::Chain(chain) => Ok((chain, report)),
        Code::Rs(_) => Err(defect),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::{RsCode, table};
    use serde_json::{Value, json};

    fn report(n: usize, k: usize) -> Value {
        let code = Code::Chain(table::find(n, k).unwrap().clone());
        serde_json::to_value(CodeReport::of(&code).unwrap()).unwrap()
    }

    #[test]
    fn a_report_certifies_its_own_code() {
        for code in table::all() {
            let report = CodeReport::of(&Code::Chain(code.clone())).unwrap();
            let text = serde_json::to_string(&report).unwrap();
            assert_eq!(parse(&text).as_ref(), Ok(code));
            assert_eq!(certify(&text), Ok((code.clone(), report)));
        }
    }

    #[test]
    fn the_headline_report() {
        let report = report(16, 11);
        assert_eq!(report["order"], json!([2, 1, 4, 5, 12, 3, 16, 6, 10, 8, 9, 11, 13, 15, 14, 7]));
        assert_eq!(report["blocks"][7], json!([1, 6]));
        let counts = ["subsets", "dependent_subsets", "natural_dependent_subsets"];
        assert_eq!(counts.map(|name| report[name].as_u64().unwrap()), [4368, 0, 0]);
        assert_eq!(report["multiplications_first_k"], 18);
        assert_eq!((&report["schema"], &report["polynomial"]), (&json!(1), &json!(285)));
        let costs = report[ESTIMATES].as_array().unwrap();
        assert_eq!(costs.len(), 6);
        let of = |at: usize, name: &str| costs[at][name].as_u64().unwrap();
        assert_eq!((of(0, "missing"), of(0, "multiplications"), of(5, "missing")), (0, 18, 5));
        assert!(of(0, "cost") < of(5, "cost") && of(0, "dense_cost") == of(5, "dense_cost"));
        assert_eq!((&costs[0]["sparse"], &costs[5]["sparse"]), (&json!(true), &json!(false)));
    }

    #[test]
    fn reed_solomon_has_a_report_too() {
        let report = CodeReport::of(&Code::Rs(RsCode::new(6, 4).unwrap())).unwrap();
        assert_eq!((report.kind, report.dependent_subsets), ("rs", 0));
        assert_eq!(report.multiplications_first_k, Some(0));
    }

    #[test]
    fn false_claims_are_named() {
        for (field, value) in [
            ("dependent_subsets", json!(1)),
            ("id", json!("0000000000000000")),
            ("generator", json!([[1]])),
            ("walkable", json!(false)),
            ("kind", json!("rs")),
        ] {
            let mut report = report(6, 4);
            report[field] = value;
            match certify(&report.to_string()) {
                Err(CodeError::Claim { field: named, .. }) => assert_eq!(named, field),
                other => panic!("{field}: {other:?}"),
            }
        }
    }

    #[test]
    fn estimates_are_no_claims() {
        let mut report = report(6, 4);
        report[ESTIMATES] = json!([]);
        assert!(certify(&report.to_string()).is_ok());
    }

    #[test]
    fn hostile_reports_are_refused() {
        for (field, value) in [
            ("schema", json!(2)),
            ("n", json!(1_000_000_000)),
            ("n", json!(-1)),
            ("k", json!(0)),
            ("field", json!("gf16")),
            ("polynomial", json!(283)),
            ("order", json!([0, 1, 2, 3, 4, 5])),
            ("order", json!([1, 2, 3, 4, 5, 5])),
            ("order", json!(vec![1; 5000])),
            ("psi", json!([[1]])),
            ("psi", json!([[256], [1], [1], [1], [1], [1]])),
            ("xi", json!(null)),
        ] {
            let mut report = report(6, 4);
            report[field] = value.clone();
            assert!(certify(&report.to_string()).is_err(), "{field} = {value}");
        }
        for text in
            ["", "{}", "[]", "null", &"[".repeat(100_000), &" ".repeat(MAX_REPORT_BYTES + 1)]
        {
            assert!(matches!(parse(text), Err(CodeError::Report { .. })));
        }
    }
}

//! The chain codes of this release, each certified: no k of its pieces are dependent (the tests
//! recount all subsets), and each of its first k hops brings one new block, so that blocks are
//! reconstructed by walking the chain.
//!
//! Entries stay forever, because stripes name them by id. The first entry with given parameters
//! also determines the order in which the nodes of a ring take their positions
//! ([`crate::placement::place`]). A later entry with another order, or a first entry for parameters
//! that had none, therefore needs a `layout` value of its own in `ShardRoot`. [`super::search`]
//! found the entries.

use std::collections::HashMap;
use std::sync::LazyLock;

use super::{ChainCode, Code, CodeError, CodeId, Layout, MAX_PIECES, RsCode};

/// A code in flat form: psi and xi hop after hop, each over the blocks of its hop in ascending
/// order.
struct Entry {
    n: usize,
    k: usize,
    /// The expected code id, which reveals a typing error in the coefficients.
    id: u64,
    order: &'static [usize],
    psi: &'static [u8],
    xi: &'static [u8],
}

#[rustfmt::skip]
const ENTRIES: [Entry; 10] = [
    Entry { n: 4, k: 2, id: 0x3944_b90b_37d7_e54f, order: &[1, 0, 3, 2], psi: &[1, 1, 161, 0], xi: &[32, 99, 38, 209] },
    Entry { n: 6, k: 4, id: 0x8301_43c0_3317_c3aa, order: &[1, 5, 0, 4, 2, 3], psi: &[1, 1, 1, 1, 116, 61, 0, 0], xi: &[208, 137, 13, 122, 171, 67, 241, 25] },
    Entry { n: 8, k: 4, id: 0x64c1_ffd5_acfa_5592, order: &[5, 3, 6, 4, 1, 2, 7, 0], psi: &[1, 1, 1, 1, 163, 177, 250, 0], xi: &[101, 99, 38, 209, 69, 68, 41, 15] },
    Entry { n: 9, k: 6, id: 0x46bb_afde_28ab_5dd6, order: &[8, 1, 6, 2, 0, 7, 4, 3, 5], psi: &[1, 1, 1, 1, 1, 1, 208, 51, 20, 48, 0, 0], xi: &[63, 137, 13, 122, 171, 116, 241, 25, 161, 103, 13, 105] },
    Entry { n: 10, k: 6, id: 0x6751_878e_5bcd_82a4, order: &[6, 0, 1, 3, 9, 8, 2, 5, 7, 4], psi: &[1, 1, 1, 1, 1, 1, 161, 122, 167, 191, 0, 0], xi: &[66, 233, 116, 73, 167, 85, 78, 18, 228, 103, 112, 221] },
    Entry { n: 12, k: 8, id: 0x4688_266e_62df_cd8a, order: &[2, 11, 3, 8, 1, 0, 9, 10, 7, 5, 4, 6], psi: &[1, 1, 1, 1, 1, 1, 1, 1, 159, 12, 137, 209, 129, 84, 0, 0], xi: &[58, 45, 177, 45, 23, 63, 179, 60, 65, 231, 240, 32, 116, 227, 208, 250] },
    Entry { n: 14, k: 10, id: 0x03fb_6851_ae12_b7c7, order: &[1, 12, 2, 11, 10, 13, 3, 0, 9, 8, 7, 4, 6, 5], psi: &[1, 1, 1, 1, 1, 1, 1, 1, 1, 233, 1, 103, 193, 99, 188, 108, 197, 105, 0, 0], xi: &[86, 102, 186, 170, 93, 92, 89, 114, 47, 206, 146, 183, 92, 160, 20, 177, 245, 127, 19, 66] },
    Entry { n: 16, k: 11, id: 0xa612_aa59_0b36_c82b, order: &[1, 0, 3, 4, 11, 2, 15, 5, 9, 7, 8, 10, 12, 14, 13, 6], psi: &[1, 1, 1, 1, 1, 1, 1, 217, 1, 138, 1, 110, 1, 108, 1, 71, 5, 193, 209, 154, 0, 0], xi: &[133, 97, 2, 42, 33, 68, 41, 230, 24, 59, 76, 217, 174, 250, 244, 72, 89, 237, 227, 192, 31, 33] },
    Entry { n: 16, k: 12, id: 0x3b5d_d2c7_28cf_49c7, order: &[0, 15, 1, 14, 3, 4, 2, 13, 12, 10, 9, 7, 6, 11, 8, 5], psi: &[1, 1, 1, 1, 1, 204, 1, 1, 1, 1, 1, 127, 1, 107, 44, 1, 173, 46, 2, 124, 219, 126, 0, 0], xi: &[58, 142, 239, 62, 230, 100, 4, 1, 206, 116, 139, 198, 175, 21, 186, 230, 50, 15, 42, 219, 21, 197, 76, 43] },
    Entry { n: 20, k: 16, id: 0xfe07_c942_45d8_76de, order: &[17, 3, 13, 2, 18, 7, 1, 14, 11, 19, 9, 0, 16, 4, 10, 12, 15, 8, 6, 5], psi: &[1, 1, 1, 30, 1, 1, 84, 1, 1, 1, 31, 107, 1, 1, 1, 38, 1, 1, 35, 1, 1, 103, 1, 166, 141, 20, 55, 223, 210, 5, 0, 0], xi: &[182, 225, 108, 97, 87, 140, 44, 251, 99, 124, 62, 179, 104, 179, 120, 230, 87, 249, 176, 171, 255, 137, 187, 206, 28, 223, 109, 30, 251, 135, 140, 245] },
];

impl Entry {
    fn code(&self) -> Result<ChainCode, CodeError> {
        let layout = Layout::new(self.n, self.k)?;
        let by_hop = |flat: &[u8]| -> Vec<Vec<u8>> {
            let mut coefs = flat.iter().copied();
            let hop = |&p: &usize| coefs.by_ref().take(layout.blocks_at(p).count()).collect();
            self.order.iter().map(hop).collect()
        };
        ChainCode::new(layout, self.order.to_vec(), by_hop(self.psi), by_hop(self.xi))
    }
}

/// Returns all chain codes of this release, by ascending n, then k.
pub fn all() -> &'static [ChainCode] {
    static ALL: LazyLock<Vec<ChainCode>> = LazyLock::new(|| {
        let codes = ENTRIES
            .iter()
            .filter_map(|entry| entry.code().ok().filter(|code| code.id() == CodeId(entry.id)));
        codes.collect()
    });
    &ALL
}

/// Returns the chain code with these parameters, if this release has one.
pub fn find(n: usize, k: usize) -> Option<&'static ChainCode> {
    all().iter().find(|code| (code.n(), code.k()) == (n, k))
}

/// Returns the code with an id that a record names: a chain code of this release, or any
/// Reed-Solomon code.
pub fn by_id(id: CodeId) -> Option<Code> {
    static RS: LazyLock<HashMap<CodeId, RsCode>> = LazyLock::new(|| {
        let parameters = (2..=MAX_PIECES).flat_map(|n| (1..n).map(move |k| (n, k)));
        let codes = parameters.filter_map(|(n, k)| RsCode::new(n, k).ok());
        codes.map(|code| (code.id(), code)).collect()
    });
    let chain = all().iter().find(|code| code.id() == id).cloned().map(Code::Chain);
    chain.or_else(|| RS.get(&id).cloned().map(Code::Rs))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::{search, subsets};

    #[test]
    fn every_entry_is_certified_again() {
        assert_eq!(all().len(), ENTRIES.len());
        for (entry, code) in ENTRIES.iter().zip(all()) {
            let (n, k) = (entry.n, entry.k);
            assert_eq!(entry.code().unwrap().id(), CodeId(entry.id), "({n},{k})");
            assert_eq!(entry.psi.len(), code.psi().iter().flatten().count(), "({n},{k})");
            assert_eq!(entry.xi.len(), code.xi().iter().flatten().count(), "({n},{k})");
            assert_eq!(subsets::dependent(code.generator()), Ok(0), "({n},{k})");
            assert_eq!(subsets::natural(code.layout(), code.order()), Ok(0), "({n},{k})");
            assert!(search::is_walkable(code.layout(), code.order()), "({n},{k})");
        }
    }

    #[test]
    fn the_promised_parameters_are_there() {
        let promised = [
            (4, 2),
            (6, 4),
            (8, 4),
            (9, 6),
            (10, 6),
            (12, 8),
            (14, 10),
            (16, 11),
            (16, 12),
            (20, 16),
        ];
        assert!(promised.iter().all(|&(n, k)| find(n, k).is_some()));
        assert_eq!(find(12, 6), None);
    }

    #[test]
    fn ids_lead_back_to_codes() {
        for code in all() {
            assert_eq!(by_id(code.id()), Some(Code::Chain(code.clone())));
        }
        let rs = RsCode::new(16, 11).unwrap();
        assert_eq!(by_id(rs.id()), Some(Code::Rs(rs)));
        assert_eq!(by_id(CodeId(0)), None);
    }
}

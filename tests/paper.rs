//! Compares the published code (RapidRAID, arXiv 1207.6744) with ours by counting dependent
//! subsets.

use rapidraid::code::{ChainCode, Layout, search, subsets};

/// (n, k), number of subsets of k pieces, number of natural dependencies, in the paper's order.
const COUNTS: [((usize, usize), u64, u64); 10] = [
    ((6, 4), 15, 0),
    ((8, 4), 70, 1),
    ((10, 5), 252, 10),
    ((10, 6), 210, 1),
    ((12, 8), 495, 1),
    ((14, 10), 1001, 1),
    ((16, 12), 1820, 1),
    ((16, 11), 4368, 21),
    ((20, 16), 4845, 1),
    ((20, 15), 15504, 25),
];

#[test]
fn the_published_order_has_these_natural_dependencies() {
    for ((n, k), all, expected) in COUNTS {
        let layout = Layout::new(n, k).unwrap();
        let order: Vec<usize> = (0..n).collect();
        assert_eq!(subsets::total(n, k), all, "({n},{k})");
        assert_eq!(subsets::natural(layout, &order), Ok(expected), "({n},{k})");
    }
}

#[test]
fn another_order_of_the_same_nodes_has_none() {
    for ((n, k), ..) in COUNTS {
        let layout = Layout::new(n, k).unwrap();
        let order = match (n, k) {
            // These searches take a few seconds, so their results are written here.
            (20, 15) => vec![4, 0, 16, 3, 5, 19, 8, 1, 2, 10, 17, 9, 11, 12, 13, 14, 7, 6, 18, 15],
            (20, 16) => vec![17, 13, 2, 19, 9, 16, 18, 12, 15, 0, 6, 14, 5, 11, 4, 7, 10, 8, 3, 1],
            _ => search::order(layout, 1, search::DEFAULT_ORDERS).unwrap(),
        };
        assert_eq!(subsets::natural(layout, &order), Ok(0), "({n},{k}) {order:?}");
        assert!(search::is_walkable(layout, &order), "({n},{k}) {order:?}");
    }
}

#[test]
fn coefficients_of_one_byte_add_no_dependency() {
    for (n, k) in [(8, 4), (10, 5), (16, 11)] {
        let code = ChainCode::paper(n, k).unwrap();
        let natural = subsets::natural(code.layout(), code.order());
        assert_eq!(subsets::dependent(code.generator()), natural, "({n},{k})");
    }
}

/// Losing nodes 10, 11, 15 and 16 of the published (16,11) code is fatal: every 11 of the other 12
/// pieces are dependent.
#[test]
fn four_lost_nodes_can_be_fatal_as_published() {
    let code = ChainCode::paper(16, 11).unwrap();
    let left: Vec<usize> =
        (1..=16).filter(|node| ![10, 11, 15, 16].contains(node)).map(|node| node - 1).collect();
    assert_eq!(code.generator().select(&left).unwrap().rank(), 10);
}

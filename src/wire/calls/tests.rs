//! Every call has one number, in the range of its callers.

use super::*;

#[test]
fn every_call_has_a_number_of_its_own() {
    let mut numbers: Vec<u8> = ALL.iter().map(|(number, _, _)| *number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), ALL.len());
}

#[test]
fn calls_between_nodes_have_numbers_of_their_range() {
    for (number, name, who) in ALL {
        assert_eq!(*who == AllowedCaller::Nodes, (40..100).contains(number), "{name}");
    }
}

//! Stub.
pub async fn run(_: &mut super::Front, _: super::args::Demo) -> super::Outcome {
    unreachable!()
}

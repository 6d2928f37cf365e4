//! Tests that compare the pictures with expected ones, character by character.

use super::*;

const PLAIN: Style = Style { columns: 100, unicode: true, paint: Paint::PLAIN };
const ASCII: Style = Style { unicode: false, ..PLAIN };

/// Returns the (16,11) chain: node j holds block j if j <= 11, and block j-5 if j >= 6.
fn stops() -> Vec<Stop> {
    let order = [2, 1, 4, 5, 12, 3, 16, 6, 10, 8, 9, 11, 13, 15, 14, 7];
    order.iter().enumerate().map(|(hop, j)| stop(*j, hop + 1)).collect()
}

fn stop(j: usize, hop: usize) -> Stop {
    Stop { node: format!("node-{j:02}"), blocks: blocks(j), piece: format!("c{hop}") }
}

fn blocks(j: usize) -> Vec<String> {
    let first = (j <= 11).then_some(j);
    let second = (j >= 6).then(|| j - 5);
    first.into_iter().chain(second).map(|block| format!("o{block}")).collect()
}

fn hops() -> Vec<HopSpan> {
    let block = 64 << 20;
    let span = |at: u64, node: &str| HopSpan {
        node: node.to_owned(),
        start_ms: 10 * at,
        end_ms: 1000 + 10 * at,
        in_bytes: if at == 0 { 0 } else { block },
        out_bytes: if at == 15 { 0 } else { block },
    };
    stops().iter().enumerate().map(|(at, stop)| span(at as u64, &stop.node)).collect()
}

/// Returns the hops of a short node, a slow one, and one that begins late.
fn uneven() -> Vec<HopSpan> {
    let span = |node: &str, start_ms, end_ms| HopSpan {
        node: node.to_owned(),
        start_ms,
        end_ms,
        in_bytes: 1 << 20,
        out_bytes: 1536,
    };
    vec![span("a", 0, 400), span("slow-node", 5, 11_900), span("late", 11_990, 12_000)]
}

fn nodes(pieces: bool, dead: &[usize]) -> Vec<Holding> {
    let node = |j| Holding {
        node: format!("node-{j:02}"),
        replicas: if pieces { Vec::new() } else { blocks(j) },
        piece: pieces.then(|| format!("c{j}")),
        dead: dead.contains(&j),
    };
    (1..=16).map(node).collect()
}

/// Compares line by line, so that the message shows the first difference.
fn assert_drawn(drawn: &str, golden: &str) {
    for (line, (drawn, golden)) in drawn.lines().zip(golden.lines()).enumerate() {
        assert_eq!(drawn, golden, "line {}", line + 1);
    }
    assert_eq!(drawn, golden);
}

#[test]
fn the_chain_visits_every_node_and_wraps() {
    assert_drawn(&chain(&stops(), PLAIN), include_str!("golden/chain.txt"));
    let narrow = Style { columns: 60, ..ASCII };
    assert_drawn(&chain(&stops()[..5], narrow), include_str!("golden/chain-ascii.txt"));
    assert_eq!(chain(&[], PLAIN), "");
}

#[test]
fn the_timeline_shows_who_was_slow() {
    let narrow = Style { columns: 80, ..PLAIN };
    assert_drawn(&timeline(&uneven(), narrow), include_str!("golden/timeline.txt"));
    let narrow = Style { columns: 60, ..ASCII };
    assert_drawn(&timeline(&uneven(), narrow), include_str!("golden/timeline-ascii.txt"));
}

#[test]
fn the_map_crosses_out_what_is_lost() {
    assert_drawn(&map(&nodes(false, &[]), PLAIN), include_str!("golden/map.txt"));
    let dead = nodes(true, &[3, 7, 8, 12, 16]);
    assert_drawn(&map(&dead, PLAIN), include_str!("golden/map-dead.txt"));
    let narrow = Style { columns: 60, ..ASCII };
    assert_drawn(&map(&nodes(false, &[6]), narrow), include_str!("golden/map-ascii.txt"));
}

#[test]
fn no_line_passes_the_width_and_ascii_stays_ascii() {
    let long = |text: &str| text.repeat(40);
    let odd = Stop { node: long("n"), blocks: vec![long("o"); 3], piece: "c\u{1b}[2J".into() };
    let mut late = HopSpan { start_ms: u64::MAX, end_ms: 1 << 40, ..hops()[3].clone() };
    late.node = long("ü\n");
    let held = Holding {
        node: long("x"),
        replicas: vec![long("r"); 9],
        piece: Some(long("p")),
        dead: false,
    };
    for columns in [0, 60, 61, 79, 80, 100, 133, 200, 10_000] {
        let style = Style { columns, ..ASCII };
        let pictures = [
            chain(&stops(), style),
            chain(&[stops(), vec![odd.clone()]].concat(), style),
            timeline(&hops(), style),
            timeline(&[hops(), vec![late.clone()]].concat(), style),
            timeline(&[], style),
            map(&nodes(false, &[1]), style),
            map(&[nodes(true, &[]), vec![held.clone()]].concat(), style),
            map(&[], style),
        ];
        for (number, picture) in pictures.iter().enumerate() {
            let widest = picture.lines().map(|line| line.chars().count()).max().unwrap_or(0);
            assert!(widest <= columns.clamp(60, 200), "picture {number} at {columns}:\n{picture}");
            assert!(!picture.contains('\u{1b}'));
            assert!(picture.is_ascii() || number == 3, "picture {number}");
        }
    }
}

#[test]
fn colours_change_nothing_but_colours() {
    let colour = Style { paint: Paint { colour: true }, ..PLAIN };
    let plain = |text: &str| {
        let parts = text.split('\u{1b}').enumerate();
        parts
            .map(|(at, part)| if at == 0 { part } else { part.split_once('m').unwrap().1 })
            .collect::<String>()
    };
    assert_eq!(plain(&chain(&stops(), colour)), chain(&stops(), PLAIN));
    assert_eq!(plain(&timeline(&hops(), colour)), timeline(&hops(), PLAIN));
}

#[test]
fn the_locale_chooses_the_characters() {
    let style = |pairs: &[(&str, &str)]| {
        let env = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Style::of_env(&env, Paint::PLAIN)
    };
    assert!(style(&[("LANG", "en_GB.UTF-8")]).unicode && style(&[("LC_ALL", "C.utf8")]).unicode);
    assert!(!style(&[("LC_ALL", "C"), ("LANG", "en_GB.UTF-8")]).unicode && !style(&[]).unicode);
    assert_eq!(
        (style(&[("COLUMNS", "80")]).columns, style(&[("COLUMNS", "x")]).columns),
        (80, 100)
    );
}

/// Compares `docs/chain.svg` with the picture that the code draws. After an intended change, copy
/// the file that the message names.
#[test]
fn the_page_has_the_picture_that_the_code_draws() {
    let drawn = svg::chain(&stops());
    if drawn != include_str!("../../../docs/chain.svg") {
        let path = std::env::temp_dir().join("rapidraid-chain.svg");
        #[allow(clippy::disallowed_methods)] // the test writes a file for a person to inspect
        std::fs::write(&path, &drawn).unwrap();
        panic!("docs/chain.svg differs from {}", path.display());
    }
}

#[test]
fn svg_escapes_what_comes_from_outside() {
    let mut hop = hops()[0].clone();
    hop.node = "<script>&\"".to_owned();
    let drawn = svg::timeline(&[hop]);
    assert!(drawn.contains("&lt;script&gt;&amp;&quot;") && !drawn.contains("<script"));
    assert!(drawn.starts_with("<svg ") && drawn.ends_with("</svg>\n"));
}

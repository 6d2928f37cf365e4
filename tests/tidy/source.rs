//! Reads Rust source as far as the architecture rules need it: code without comments and literals,
//! tokens, paths.

/// Returns the code of a source text with comments, strings and character literals blanked; line
/// breaks stay.
pub fn code_of(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = skip_literal(&chars, at);
        if end > at {
            let blank = |c: &char| if *c == '\n' { '\n' } else { ' ' };
            out.extend(chars[at..end].iter().map(blank));
            at = end;
        } else {
            out.push(chars[at]);
            at += 1;
        }
    }
    out
}

/// Returns the end of the comment or literal that begins at `at`, or `at` if none begins there.
fn skip_literal(chars: &[char], at: usize) -> usize {
    let is = |offset: usize, c: char| chars.get(at + offset) == Some(&c);
    if is(0, '/') && is(1, '/') {
        return chars[at..].iter().position(|c| *c == '\n').map_or(chars.len(), |n| at + n);
    }
    if is(0, '/') && is(1, '*') {
        return skip_block_comment(chars, at);
    }
    if is(0, '"') {
        return skip_quoted(chars, at, '"');
    }
    if is(0, '\'') {
        // A lifetime is not a literal: 'a without a closing quote.
        let literal = is(1, '\\') || is(2, '\'');
        return if literal { skip_quoted(chars, at, '\'') } else { at };
    }
    if is(0, 'r')
        && !at.checked_sub(1).is_some_and(|before| is_word(chars[before]) && chars[before] != 'b')
    {
        let hashes = chars[at + 1..].iter().take_while(|c| **c == '#').count();
        if is(1 + hashes, '"') {
            return skip_raw(chars, at + 2 + hashes, hashes);
        }
    }
    at
}

fn skip_block_comment(chars: &[char], at: usize) -> usize {
    let (mut depth, mut end) = (0, at);
    while end < chars.len() {
        match (chars[end], chars.get(end + 1)) {
            ('/', Some('*')) => (depth, end) = (depth + 1, end + 2),
            ('*', Some('/')) => (depth, end) = (depth - 1, end + 2),
            _ => end += 1,
        }
        if depth == 0 {
            break;
        }
    }
    end
}

fn skip_quoted(chars: &[char], at: usize, quote: char) -> usize {
    let mut end = at + 1;
    while end < chars.len() && chars[end] != quote {
        end += if chars[end] == '\\' { 2 } else { 1 };
    }
    (end + 1).min(chars.len())
}

fn skip_raw(chars: &[char], mut end: usize, hashes: usize) -> usize {
    while end < chars.len() {
        let closing = chars[end] == '"'
            && chars[end + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes;
        end += 1;
        if closing {
            return end + hashes;
        }
    }
    end
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// A word or one punctuation character of the code (`::` is one token), with its line number from
/// 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    pub text: String,
    pub line: usize,
}

/// Returns the tokens of `code`, which is a result of [`code_of`].
pub fn tokens(code: &str) -> Vec<Token> {
    let mut out: Vec<Token> = Vec::new();
    for (number, line) in code.lines().enumerate() {
        let mut rest = line.trim_start();
        while let Some(first) = rest.chars().next() {
            let end = if is_word(first) {
                rest.find(|c| !is_word(c)).unwrap_or(rest.len())
            } else if rest.starts_with("::") {
                2
            } else {
                first.len_utf8()
            };
            let (token, tail) = rest.split_at(end);
            out.push(Token { text: token.to_owned(), line: number + 1 });
            rest = tail.trim_start();
        }
    }
    out
}

/// Returns the top modules that a file names, with line numbers: `crate::a::b` names `a`; `use
/// crate::{a, b::{c, d}}` names `a` and `b`; `super::` counts if it reaches the root. `depth` is
/// the number of levels by which the file's module is below the root.
pub fn modules_named(tokens: &[Token], depth: usize) -> Vec<(String, usize)> {
    let text = |at: usize| tokens.get(at).map_or("", |t| t.text.as_str());
    let (mut out, mut braces, mut at) = (Vec::new(), Vec::new(), 0);
    while at < tokens.len() {
        let mut path = None;
        match text(at) {
            "{" => braces.push(at >= 2 && text(at - 2) == "mod"),
            "}" => drop(braces.pop()),
            "crate" if text(at + 1) == "::" => path = Some(at + 2),
            "super" => {
                let climbed = (0..).take_while(|n| text(at + 2 * n) == "super").count();
                let inline = braces.iter().filter(|module| **module).count();
                path = (climbed >= depth + inline).then_some(at + 2 * climbed);
                at += 2 * (climbed - 1);
            }
            _ => {}
        }
        if let Some(after) = path {
            out.extend(names_at(tokens, after));
        }
        at += 1;
    }
    out
}

/// Returns the name at `at`, or the first names of the group that opens there.
fn names_at(tokens: &[Token], at: usize) -> Vec<(String, usize)> {
    let named = |token: &Token| (token.text.clone(), token.line);
    if tokens.get(at).is_none_or(|token| token.text != "{") {
        return tokens.get(at).map(named).into_iter().collect();
    }
    let (mut out, mut depth) = (Vec::new(), 0);
    for pair in tokens[at..].windows(2) {
        match pair[0].text.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
        match (depth, pair[0].text.as_str()) {
            (0, _) => break,
            (1, "{" | ",") if pair[1].text != "}" => out.push(named(&pair[1])),
            _ => {}
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(code: &str, depth: usize) -> Vec<(String, usize)> {
        modules_named(&tokens(&code_of(code)), depth)
    }

    fn pairs<const N: usize>(of: [(&str, usize); N]) -> Vec<(String, usize)> {
        of.map(|(name, line)| (name.to_owned(), line)).to_vec()
    }

    #[test]
    fn comments_and_literals_are_no_code() {
        let text = "a /* b /* c */ d */ e // f\n\"g\\\" h\" i r#\"j\" k\"# l 'm' '\\'' n<'o> br\"p\" for_r\"q\"";
        let words: Vec<String> = tokens(&code_of(text)).into_iter().map(|t| t.text).collect();
        assert_eq!(words, ["a", "e", "i", "l", "n", "<", "'", "o", ">", "b", "for_r"]);
    }

    #[test]
    fn paths_and_groups_name_their_top_modules() {
        let code = "use crate::a::x;\nuse crate::{b, c::{d, e}, f as g,};\ncrate::h!(); pub(crate) fn i() {}";
        assert_eq!(named(code, 1), pairs([("a", 1), ("b", 2), ("c", 2), ("f", 2), ("h", 3)]));
    }

    #[test]
    fn super_counts_only_at_the_root() {
        let code = "use super::a; use super::super::b;\nmod tests { use super::super::c; use super::super::super::d; }";
        assert_eq!(named(code, 2), pairs([("b", 1), ("d", 2)]));
    }
}

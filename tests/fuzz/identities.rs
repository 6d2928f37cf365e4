//! Target for certificates: a changed certificate is not accepted as its holder's.

use std::fmt::Write as _;

use rapidraid::net::identity::{Identity, IdentityError};

use crate::fixtures;
use crate::target::{Memory, Seen, Target, within};

/// A key that is never valid. It is checked after the certificates, so an error about the key means
/// that the certificates were accepted.
const KEY: &str = "no key";

fn pem(der: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = "-----BEGIN CERTIFICATE-----\n".to_owned();
    for line in der.chunks(48) {
        for three in line.chunks(3) {
            let bits = three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte));
            let bits = bits << (8 * (3 - three.len()));
            for place in 0..4 {
                let digit = DIGITS[(bits >> (18 - 6 * place) & 63) as usize];
                text.push(if place > three.len() { '=' } else { char::from(digit) });
            }
        }
        text.push('\n');
    }
    writeln!(text, "-----END CERTIFICATE-----").unwrap();
    text
}

/// Fuzzes identities. The input is `0`, the length of the authority's certificate, that certificate
/// and the member's as DER; or `1` and both as PEM, separated by a NUL.
pub fn identities() -> Target {
    let golden = fixtures::lines("identity/v1/certificates.txt");
    let of = |name: &str| golden.iter().find(|(of, _)| of == name).unwrap().1.clone();
    let (ca, node, client) = (of("authority"), of("node"), of("client"));
    let der = |cert: &[u8]| [&[0], &(ca.len() as u16).to_le_bytes()[..], &ca, cert].concat();
    let text = [b"\x01".to_vec(), pem(&ca).into_bytes(), vec![0], pem(&node).into_bytes()].concat();
    let corpus = vec![der(&node), der(&client), text];
    let words: [&[u8]; 6] = [
        b"-----BEGIN CERTIFICATE-----",
        b"-----END CERTIFICATE-----",
        b"rapidraid://",
        b"/node/",
        b"/client/",
        b"/ca",
    ];
    let memory = Memory { base_bytes: 256 << 10, per_byte: 64 };
    let check = move |bytes: &[u8]| {
        let (ca, cert, der) = match bytes.split_first() {
            Some((0, rest)) => {
                let Some((len, rest)) = rest.split_first_chunk() else {
                    return Ok(Seen::default());
                };
                let len = usize::from(u16::from_le_bytes(*len)).min(rest.len());
                let (ca, cert) = rest.split_at(len);
                (pem(ca), pem(cert), Some(cert))
            }
            Some((1, rest)) => {
                let text = String::from_utf8_lossy(rest);
                let (ca, cert) = text.split_once('\0').unwrap_or((&text, ""));
                (ca.to_owned(), cert.to_owned(), None)
            }
            _ => return Ok(Seen::default()),
        };
        let (found, peak_bytes) =
            within(memory, bytes.len(), || Identity::from_pem(&ca, &cert, KEY).err())?;
        let accepted = match found {
            None => return Err("it is somebody without a key".into()),
            Some(IdentityError::Malformed { what: "key", .. }) => true,
            Some(_) => false,
        };
        let is_golden = der.is_none_or(|cert| cert == node || cert == client);
        if accepted && !is_golden {
            return Err("a certificate that the authority has not issued is believed".into());
        }
        Ok(Seen { accepted, peak_bytes })
    };
    Target {
        name: "identities",
        cases: 20_000,
        corpus,
        words: words.to_vec(),
        check: Box::new(check),
    }
}

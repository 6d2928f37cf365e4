//! The tests of the configuration: settings have the values that the documentation states, and
//! errors name the line of a mistake.

use super::*;
use crate::kind::ErrorKind;
use crate::units::KIB;

const ID: &str = "00112233445566778899aabbccddeeff";
const PAGE: &str = include_str!("../../docs/configuration.md");

fn minimal() -> String {
    format!(
        "cluster = \"{ID}\"\nname = \"node-1\"\nadvertise = \"node-1:7440\"\nseeds = [\"node-2:7440\"]\n"
    )
}

fn with(
    text: &str,
    env: &[(&str, &str)],
    options: &[(&str, &str)],
) -> Result<NodeConfig, ConfigError> {
    let map = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<BTreeMap<_, _>>()
    };
    let (env, options) = (map(env), map(options));
    NodeConfig::parse(Sources {
        file: Path::new("etc/rapidraid.toml"),
        text,
        env: &env,
        options: &options,
    })
}

fn client(text: &str) -> Result<ClientConfig, ConfigError> {
    let none = BTreeMap::new();
    let file = Path::new("c.toml");
    ClientConfig::parse(Sources { file, text, env: &none, options: &none })
}

#[test]
fn a_minimal_file_has_the_defaults_of_the_page() {
    let config = with(&minimal(), &[], &[]).unwrap();
    assert_eq!(config.listen.to_string(), "0.0.0.0:7440");
    assert_eq!(config.data_dir, Path::new("etc/data"));
    assert_eq!(config.membership.key, Path::new("etc/key.pem"));
    assert_eq!((config.memory_bytes, config.block_bytes), (256 * MIB, 64 * MIB));
    assert_eq!((config.storage, config.serve_catalogue), (true, false));
    let codes: Vec<String> = config.codes.iter().map(CodeShape::to_string).collect();
    assert_eq!(codes, ["16,11", "14,10", "12,8", "6,4"]);
    assert_eq!(config.timeouts.lease, Duration::from_secs(7));
    assert_eq!((config.high_water_percent, config.log_level), (85, LogLevel::Info));
}

#[test]
fn options_win_over_environment_over_file() {
    let text = minimal() + "[code]\nblock = \"1MiB\"\nlist = [\"6,4\"]\n";
    let env = ("RAPIDRAID_CODE_BLOCK", "2MiB");
    let block = |env: &[(&str, &str)], options: &[(&str, &str)]| {
        with(&text, env, options).unwrap().block_bytes
    };
    assert_eq!(block(&[], &[]), MIB);
    assert_eq!(block(&[env], &[]), 2 * MIB);
    assert_eq!(block(&[env], &[("code.block", "4MiB")]), 4 * MIB);
    let more = [
        ("RAPIDRAID_STORAGE", "false"),
        ("RAPIDRAID_SEEDS", "a:1 b:2"),
        ("RAPIDRAID_CODE_LIST", "16,11 6,4"),
        ("RAPIDRAID_TIMEOUTS_LEASE_S", "3"),
        ("RAPIDRAID_PORT", "tcp://10.0.0.1:80"),
    ];
    let config = with(&text, &more, &[]).unwrap();
    assert_eq!((config.storage, config.membership.seeds.len(), config.codes.len()), (false, 2, 2));
    assert_eq!(config.timeouts.lease, Duration::from_secs(3));
}

#[test]
fn mistakes_are_named_with_place_finding_and_expectation() {
    let base = minimal();
    let cases = [
        (
            "[code]\nblock = \"65KiB\"",
            "etc/rapidraid.toml:6: `code.block` is \"65KiB\"; expected a multiple of 64KiB",
        ),
        (
            "[code]\nblok = 1",
            "etc/rapidraid.toml:6: found the setting `code.blok`, which a node does not have; expected `code.block`?",
        ),
        (
            "colour = 1",
            "rapidraid.toml:5: found the setting `colour`, which a node does not have; expected one of cluster, name",
        ),
        ("storage = \"yes\"", "rapidraid.toml:5: `storage` is \"yes\"; expected true or false"),
        ("memory = \"63MiB\"", "expected a size of at least 64MiB"),
        ("listen = \"localhost\"", "expected an IP address and a port"),
        ("listen = [1]", "`listen` is a list of something else than text"),
        ("[disk]\nhigh_water = 100", "expected a whole number of percent"),
        ("[code]\nlist = [\"11,16\"]", "expected 1 to 8 codes"),
        ("[code]\nlist = [\"255,200\"]", "expected 1 to 8 codes"),
        ("[network]\ncongestion = \"reno\"", "expected cubic or bbr"),
        (
            "[timeouts]\nlease_s = -1",
            "`timeouts.lease_s` is -1; expected a whole number of seconds",
        ),
        ("memory = 99999999999999999999", "is a number beyond 2^63"),
        ("zone = \"a/b\"", "`zone` is \"a/b\"; expected a name"),
        (
            "[policy]\narchive_all_but = -1",
            "etc/rapidraid.toml:6: `policy.archive_all_but` is -1; expected a whole number of steps, or \"never\"",
        ),
        ("[policy]\nkeep_newest = 0", "expected a whole number of steps from 1, or \"all\""),
        (
            "[policy]\nkeep_newest = \"never\"",
            "is \"never\"; expected a whole number of steps from",
        ),
        ("[policy]\nkeep_every = 0", "expected a whole number from 1, or \"never\""),
        (
            "[repair]\nshare = 101",
            "`repair.share` is 101; expected a whole number of percent, 0 to 100",
        ),
        ("[repair]\ngrace_s = 0", "expected a whole number of seconds, 1 to 86400"),
        (
            "[policy]\nkeep_evry = 1",
            "`policy.keep_evry`, which a node does not have; expected `policy.keep_every`?",
        ),
        (
            "[policy.job.\"a.b\"]\nkeep_every = 2\nkeep_newest = \"none\"",
            "etc/rapidraid.toml:7: `policy.job.\"a.b\".keep_newest` is \"none\"; expected",
        ),
        (
            "[policy.job.\"a.b\"]\nkeep_newst = 2",
            "etc/rapidraid.toml:6: found the setting `policy.job.\"a.b\".keep_newst`, which a node does not have; expected `policy.job.*.keep_newest`?",
        ),
        (
            "[policy.job.\"a/b\"]",
            "etc/rapidraid.toml:5: `policy.job` is \"a/b\"; expected a job's name",
        ),
        ("[policy.job]\nx = 1", "etc/rapidraid.toml:6: found the setting `policy.job.x`"),
        ("[policy.job.a.b]\nkeep_newest = 1", "found the setting `policy.job.\"a\".b`"),
        ("storage = ", "etc/rapidraid.toml:5: "),
        ("storage = true\nstorage = true", "etc/rapidraid.toml:6: "),
    ];
    for (line, expected) in cases {
        let error = with(&format!("{base}{line}\n"), &[], &[]).unwrap_err();
        let message = error.to_string();
        assert!(message.contains(expected), "{line}\n  gives {message}\n  not   {expected}");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    let error = with(&base, &[("RAPIDRAID_MEMORY", "lots")], &[]).unwrap_err().to_string();
    assert!(
        error.starts_with("environment variable RAPIDRAID_MEMORY: `memory` is \"lots\""),
        "{error}"
    );
    let error = with(&base, &[], &[("code.k", "1")]).unwrap_err().to_string();
    assert!(error.contains("option for `code.k`"), "{error}");
    let long = format!("name = \"{}\"", "x".repeat(500));
    let error = with(&long, &[], &[]).unwrap_err().to_string();
    assert!(error.len() < 400, "{error}");
    let long = "x".repeat(MAX_FILE_BYTES / 2);
    for text in [format!("{long} = 1"), format!("[policy.job.\"{long}\"]\n{long} = 1")] {
        let error = with(&text, &[], &[]).unwrap_err().to_string();
        assert!(error.len() < 1000, "an error of {} bytes", error.len());
    }
    let error = with(&base, &[], &[(&long, "1")]).unwrap_err().to_string();
    assert!(error.len() < 1000, "an error of {} bytes", error.len());
    let huge = " ".repeat(MAX_FILE_BYTES + 1);
    assert!(matches!(with(&huge, &[], &[]), Err(ConfigError::TooLong { .. })));
}

#[test]
fn a_job_has_rules_of_its_own_and_the_others_of_all() {
    let rule = |archive_all_but, keep_newest, keep_every| Rule {
        archive_all_but,
        keep_newest,
        keep_every,
    };
    let policy = |text: &str, env: &[(&str, &str)]| {
        with(&format!("{}{text}", minimal()), env, &[]).unwrap().policy
    };
    assert_eq!(policy("", &[]), Policy { rule: rule(Some(2), None, None), jobs: BTreeMap::new() });
    let text = "[policy]\nkeep_newest = 9\nkeep_every = 1000\n[policy.job.\"a.b\"]\narchive_all_but = \"never\"\n\
        keep_newest = \"all\"\n[policy.job.c]\nkeep_every = \"never\"\n[policy.job.d]\n";
    let read = policy(text, &[]);
    let of = |name: &str| read.of(&name.parse().unwrap());
    assert_eq!(of("other"), rule(Some(2), Some(9), Some(1000)));
    assert_eq!(of("a.b"), rule(None, None, Some(1000)));
    assert_eq!(of("c"), rule(Some(2), Some(9), None));
    assert_eq!(of("d"), read.rule);
    let env = [
        ("RAPIDRAID_POLICY_ARCHIVE_ALL_BUT", "never"),
        ("RAPIDRAID_POLICY_KEEP_NEWEST", "5"),
        ("RAPIDRAID_POLICY_KEEP_EVERY", "never"),
    ];
    let read = policy(text, &env);
    assert_eq!(read.rule, rule(None, Some(5), None));
    let many = |count: usize| {
        let tables = (0..count).map(|at| format!("[policy.job.j{at}]\n"));
        with(&format!("{}{}", minimal(), tables.collect::<String>()), &[], &[])
    };
    assert_eq!(many(256).unwrap().policy.jobs.len(), 256);
    assert!(many(257).unwrap_err().to_string().contains("at most 256 jobs"));
}

#[test]
fn what_has_no_default_is_asked_for() {
    for key in ["cluster", "name", "advertise", "seeds"] {
        let text: String = minimal()
            .lines()
            .filter(|line| !line.starts_with(key))
            .map(|l| l.to_owned() + "\n")
            .collect();
        let error = with(&text, &[], &[]).unwrap_err();
        let variable = format!("RAPIDRAID_{}", key.to_uppercase());
        assert!(
            matches!(&error, ConfigError::Missing { key: k, variable: v, .. } if *k == key && *v == variable),
            "{error}"
        );
    }
    let alone = minimal().replace("seeds = [\"node-2:7440\"]", "seeds = []");
    assert!(with(&alone, &[], &[]).is_err(), "nobody to ask for the catalogue");
    assert!(with(&(alone + "catalogue.serve = true"), &[], &[]).is_ok());
}

#[test]
fn a_client_refuses_a_nodes_file_and_says_so() {
    let error = client(&minimal()).unwrap_err().to_string();
    assert!(error.contains("c.toml:3") && error.contains("a node's file"), "{error}");
    let text: String =
        minimal().lines().filter(|l| !l.starts_with("adv")).map(|l| l.to_owned() + "\n").collect();
    assert_eq!(client(&text).unwrap().membership.name.as_str(), "node-1");
}

#[test]
fn a_client_looks_where_the_page_says() {
    let env = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<BTreeMap<_, _>>()
    };
    let all = env(&[("RAPIDRAID_CONFIG", "b"), ("XDG_CONFIG_HOME", "/x"), ("HOME", "/h")]);
    assert_eq!(ClientConfig::candidates(Some(Path::new("a")), &all), [Path::new("a")]);
    assert_eq!(ClientConfig::candidates(None, &all), [Path::new("b")]);
    let xdg = env(&[("XDG_CONFIG_HOME", "/x"), ("HOME", "/h")]);
    let home = env(&[("XDG_CONFIG_HOME", "relative"), ("HOME", "/h"), ("RAPIDRAID_CONFIG", "")]);
    let found = |env| ClientConfig::candidates(None, env);
    let here = Path::new("rapidraid.toml");
    assert_eq!(found(&xdg), [here, Path::new("/x/rapidraid/rapidraid.toml")]);
    assert_eq!(found(&home), [here, Path::new("/h/.config/rapidraid/rapidraid.toml")]);
    assert_eq!(found(&env(&[])), [here]);
}

#[test]
fn addresses_read_as_the_resolver_takes_them() {
    for good in ["a:1", "10.0.0.1:7440", "[::1]:7440", "node-1.example.org:65535"] {
        assert!(good.parse::<HostPort>().is_ok(), "{good}");
    }
    for bad in
        ["", "a", ":1", "a:", "a:0", "a:65536", "a:+1", "a b:1", "::1:7440", "[a]:1", "a/b:1"]
    {
        assert!(bad.parse::<HostPort>().is_err(), "{bad}");
    }
}

#[test]
fn the_page_has_every_setting_and_its_examples_parse() {
    let rows: Vec<&str> =
        PAGE.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    // The page describes the settings that a client shares with a node once, with the node's.
    let own: Vec<&str> =
        CLIENT_SETTINGS.iter().copied().filter(|key| !NODE_SETTINGS.contains(key)).collect();
    let known = [NODE_SETTINGS, &JOB_SETTINGS, &own].concat();
    assert_eq!(rows, known, "docs/configuration.md lists other settings than there are");
    for key in NODE_SETTINGS.iter().chain(&own) {
        assert!(PAGE.contains(&format!("`{}`", variable_of(key))), "{key}: its variable");
    }
    let examples: Vec<&str> =
        PAGE.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert_eq!(examples.len(), 3);
    let config = with(examples[0], &[], &[]).unwrap();
    let plain = with(&minimal(), &[], &[]).unwrap();
    assert_eq!(config.timeouts, plain.timeouts, "the example shows the defaults");
    assert_eq!((&config.codes, &config.policy), (&plain.codes, &plain.policy));
    let sizes = |c: &NodeConfig| (c.memory_bytes, c.block_bytes, c.high_water_percent, c.listen);
    assert_eq!(sizes(&config), sizes(&plain));
    let rules = with(&(minimal() + examples[1]), &[], &[]).unwrap().policy;
    assert_eq!((rules.rule.keep_newest, rules.jobs.len()), (Some(20), 2));
    client(examples[2]).unwrap();
    assert!(PAGE.contains("1 MiB") && MAX_FILE_BYTES as u64 == 1024 * KIB);
}

//! `rapidraid-cluster relay`: links in user space that delay and lose frames, for kernels without
//! `netem`.
//!
//! A link consists of two TAP devices in the namespace of this process; frames from one device are
//! sent to the other. The process that started the relay moves one of them into the host's
//! namespace. The relay and its devices end when its stdin ends.

use std::io::{Read as _, Write as _};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Once};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rapidraid::entropy::{Entropy, SeededEntropy};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

/// Maximum number of frames in transit: one second of 150 Mbit/s in datagrams of 1,200 bytes.
/// Further frames are dropped, and the relay reports that.
const MAX_FRAMES: usize = 16_384;
/// Length of a frame of the largest MTU, with its Ethernet header (14 bytes) and a VLAN tag (4).
const MAX_FRAME_BYTES: usize = 65_535 + 18;

/// The arguments of a relay.
#[derive(Debug, clap::Args)]
pub struct Relay {
    /// Two devices to create and to join, such as v3=w3
    #[arg(long = "link", value_name = "A=B", required = true)]
    links: Vec<String>,
    /// Bytes of a packet on the links
    #[arg(long)]
    mtu: u16,
    /// Delay of each frame in each direction, in milliseconds
    #[arg(long, default_value_t = 0)]
    delay_ms: u32,
    /// Percentage of frames that are lost at random, in each direction
    #[arg(long, default_value_t = 0.0)]
    loss_percent: f64,
}

impl Relay {
    /// Creates the links, prints `ready`, and relays until stdin ends.
    pub fn run(&self) -> Result<()> {
        ensure!((0.0..=100.0).contains(&self.loss_percent), "--loss-percent is 0 to 100");
        let mut seed = 0;
        for link in &self.links {
            let (a, b) = link.split_once('=').with_context(|| format!("{link:?} is not A=B"))?;
            let (a, b) = (self.device(a)?, self.device(b)?);
            for (from, to) in [(&a, &b), (&b, &a)] {
                seed += 1;
                self.relay(from.clone(), to.clone(), seed);
            }
        }
        writeln!(std::io::stdout(), "ready")?;
        std::io::stdout().flush()?;
        // Stdin ends when the process that started the relay ends.
        let mut nothing = Vec::new();
        std::io::stdin().take(1 << 20).read_to_end(&mut nothing)?;
        Ok(())
    }

    fn device(&self, name: &str) -> Result<Arc<SyncDevice>> {
        let device = DeviceBuilder::new().name(name).layer(Layer::L2).mtu(self.mtu).build_sync();
        Ok(Arc::new(device.with_context(|| format!("cannot make the device {name}"))?))
    }

    /// Starts two threads, which end with the process.
    fn relay(&self, from: Arc<SyncDevice>, to: Arc<SyncDevice>, seed: u64) {
        let (sender, frames) = sync_channel(MAX_FRAMES);
        let delay = Duration::from_millis(self.delay_ms.into());
        let lost = Loss { of_a_million: (self.loss_percent * 1e4) as u64, seed };
        thread::spawn(move || take(&from, delay, &lost, &sender));
        thread::spawn(move || give(&to, &frames));
    }
}

/// The selection of lost frames. The same seed selects the same ones.
struct Loss {
    of_a_million: u64,
    seed: u64,
}

static FULL: Once = Once::new();

/// A frame and the time at which it is due.
type Frame = (Instant, Vec<u8>);

fn take(from: &SyncDevice, delay: Duration, loss: &Loss, frames: &SyncSender<Frame>) {
    let random = SeededEntropy::new(loss.seed);
    let mut buffer = vec![0; MAX_FRAME_BYTES];
    while let Ok(len) = from.recv(&mut buffer) {
        let is_lost = loss.of_a_million > 0 && random.below(1_000_000) < loss.of_a_million;
        if is_lost {
            continue;
        }
        let frame = (Instant::now() + delay, buffer[..len].to_vec());
        if frames.try_send(frame).is_err() {
            FULL.call_once(|| {
                eprintln!("relay: {MAX_FRAMES} frames wait; more are lost than asked")
            });
        }
    }
    // A process that uses a dead link would wait for a long time.
    eprintln!("relay: a device is gone");
    std::process::exit(1);
}

fn give(to: &SyncDevice, frames: &Receiver<Frame>) {
    while let Ok((due, frame)) = frames.recv() {
        sleep(due.saturating_duration_since(Instant::now()));
        // A device that is down accepts nothing.
        let _ = to.send(&frame);
    }
}

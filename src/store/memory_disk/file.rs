//! The bytes of a file in memory: what is seen, and what a power cut would leave.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::entropy::{Entropy, SeededEntropy};

const PAGE: usize = 4096;
/// What a medium writes whole or not at all.
pub(super) const SECTOR: usize = 512;

type Page = [u8; PAGE];

/// Bytes in pages that are shared until one side writes, so that images are cheap to keep.
#[derive(Clone, Default)]
pub(super) struct Contents {
    pages: Vec<Arc<Page>>,
    pub(super) len: u64,
}

impl Contents {
    /// Cuts, or extends with zeros.
    pub(super) fn set_len(&mut self, len: u64) {
        self.pages.resize_with(len.div_ceil(PAGE as u64) as usize, || Arc::new([0; PAGE]));
        let used = (len % PAGE as u64) as usize;
        if len < self.len
            && used > 0
            && let Some(last) = self.pages.last_mut()
        {
            Arc::make_mut(last)[used..].fill(0);
        }
        self.len = len;
    }

    /// Writes, and says which pages changed.
    pub(super) fn write(&mut self, bytes: &[u8], offset: u64) -> std::ops::Range<usize> {
        let end = offset + bytes.len() as u64;
        if end > self.len {
            self.set_len(end);
        }
        let first = (offset / PAGE as u64) as usize;
        let (mut rest, mut at) = (bytes, (offset % PAGE as u64) as usize);
        let mut page = first;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(PAGE - at));
            Arc::make_mut(&mut self.pages[page])[at..at + now.len()].copy_from_slice(now);
            (rest, at, page) = (later, 0, page + 1);
        }
        first..page
    }

    /// Fills `buf`; `false` when the content ends before.
    pub(super) fn read(&self, buf: &mut [u8], offset: u64) -> bool {
        if offset.checked_add(buf.len() as u64).is_none_or(|end| end > self.len) {
            return false;
        }
        let (mut page, mut at) = ((offset / PAGE as u64) as usize, (offset % PAGE as u64) as usize);
        let mut rest = buf;
        while !rest.is_empty() {
            let now = rest.len().min(PAGE - at);
            rest[..now].copy_from_slice(&self.pages[page][at..at + now]);
            (rest, at, page) = (&mut rest[now..], 0, page + 1);
        }
        true
    }

    /// Flips a bit; `false` when there is no such bit.
    pub(super) fn flip(&mut self, bit: u64) -> bool {
        let byte = bit / 8;
        if byte >= self.len {
            return false;
        }
        let page = &mut self.pages[(byte / PAGE as u64) as usize];
        Arc::make_mut(page)[(byte % PAGE as u64) as usize] ^= 1 << (bit % 8);
        true
    }
}

/// A file: what is seen, what is durable, and which pages differ because they were written since.
#[derive(Default)]
pub(super) struct FileState {
    pub(super) seen: Contents,
    pub(super) durable: Contents,
    dirty: BTreeSet<usize>,
    pub(super) reserved: u64,
    /// Sectors that cannot be read.
    pub(super) unreadable: BTreeSet<u64>,
}

impl FileState {
    /// Whether one of the sectors of a range cannot be read.
    pub(super) fn is_unreadable(&self, offset: u64, len: u64) -> bool {
        let end = offset.saturating_add(len).div_ceil(SECTOR as u64);
        self.unreadable.range(offset / SECTOR as u64..end).next().is_some()
    }

    /// A file of which everything is durable.
    pub(super) fn synced(contents: Contents) -> Self {
        Self { seen: contents.clone(), durable: contents, ..Self::default() }
    }

    pub(super) fn write(&mut self, bytes: &[u8], offset: u64) {
        self.dirty.extend(self.seen.write(bytes, offset));
    }

    /// Cuts or extends both images.
    pub(super) fn set_len(&mut self, len: u64) {
        self.seen.set_len(len);
        self.durable.set_len(len);
        self.dirty.retain(|page| *page < self.seen.pages.len());
    }

    /// As [`sync`](Self::sync), but the first byte of the first page written arrives with a flipped bit.
    pub(super) fn sync_spoilt(&mut self) {
        let first = self.dirty.first().copied();
        self.sync();
        if let Some(page) = first {
            self.durable.flip(page as u64 * PAGE as u64 * 8);
        }
    }

    /// What was written becomes durable.
    pub(super) fn sync(&mut self) {
        self.durable.set_len(self.seen.len);
        for page in std::mem::take(&mut self.dirty) {
            if let (Some(to), Some(from)) =
                (self.durable.pages.get_mut(page), self.seen.pages.get(page))
            {
                to.clone_from(from);
            }
        }
    }

    /// What it takes of the disk.
    pub(super) fn space(&self) -> u64 {
        self.seen.len.max(self.reserved)
    }

    /// Any of the states that a power cut may leave: each sector and the length old or new.
    pub(super) fn torn(&self, coin: &SeededEntropy) -> Contents {
        let mut out = self.durable.clone();
        out.set_len(if coin.below(2) == 0 { self.durable.len } else { self.seen.len });
        for (at, page) in out.pages.iter_mut().enumerate().filter(|(at, _)| self.dirty.contains(at))
        {
            let Some(seen) = self.seen.pages.get(at) else { continue };
            let sectors = Arc::make_mut(page).chunks_mut(SECTOR).zip(seen.chunks(SECTOR));
            for (to, from) in sectors.filter(|_| coin.below(2) == 1) {
                to.copy_from_slice(from);
            }
        }
        out.set_len(out.len); // clears what new sectors brought past the old length
        out
    }
}

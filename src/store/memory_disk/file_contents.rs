//! The bytes of a file in memory: the bytes that processes see, and the bytes that a power cut
//! would leave.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::entropy::{Entropy, SeededEntropy};

const PAGE: usize = 4096;
/// The unit that a medium writes atomically, in bytes.
pub(super) const SECTOR: usize = 512;

type Page = [u8; PAGE];

/// File contents in copy-on-write pages, so that images are cheap to keep.
#[derive(Clone, Default)]
pub(super) struct Contents {
    pages: Vec<Arc<Page>>,
    pub(super) len: u64,
}

impl Contents {
    /// Truncates, or extends with zeros.
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

    /// Writes `bytes` at `offset`. Returns the range of pages that changed.
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

    /// Fills `buf` with the bytes from `offset` on. Returns `false` if the file ends before `buf`
    /// is full.
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

    /// Flips a bit. Returns `false` if there is no such bit.
    pub(super) fn flip_bit(&mut self, bit: u64) -> bool {
        let byte = bit / 8;
        if byte >= self.len {
            return false;
        }
        let page = &mut self.pages[(byte / PAGE as u64) as usize];
        Arc::make_mut(page)[(byte % PAGE as u64) as usize] ^= 1 << (bit % 8);
        true
    }
}

/// A file: its visible and its durable contents, and the pages that were written since the last
/// sync.
#[derive(Default)]
pub(super) struct FileState {
    pub(super) visible: Contents,
    pub(super) durable: Contents,
    dirty: BTreeSet<usize>,
    pub(super) reserved: u64,
    /// Numbers of the unreadable sectors.
    pub(super) unreadable: BTreeSet<u64>,
}

impl FileState {
    /// Returns whether the range touches an unreadable sector.
    pub(super) fn is_unreadable(&self, offset: u64, len: u64) -> bool {
        let end = offset.saturating_add(len).div_ceil(SECTOR as u64);
        self.unreadable.range(offset / SECTOR as u64..end).next().is_some()
    }

    /// Returns a file whose contents are all durable.
    pub(super) fn with_synced_contents(contents: Contents) -> Self {
        Self { visible: contents.clone(), durable: contents, ..Self::default() }
    }

    pub(super) fn write(&mut self, bytes: &[u8], offset: u64) {
        self.dirty.extend(self.visible.write(bytes, offset));
    }

    /// Truncates or extends both images.
    pub(super) fn resize_both_images(&mut self, len: u64) {
        self.visible.set_len(len);
        self.durable.set_len(len);
        self.dirty.retain(|page| *page < self.visible.pages.len());
    }

    /// Syncs like [`sync`](Self::sync), but flips a bit in the first byte of the first written page
    /// on the medium.
    pub(super) fn sync_flipping_bit(&mut self) {
        let first = self.dirty.first().copied();
        self.sync();
        if let Some(page) = first {
            self.durable.flip_bit(page as u64 * PAGE as u64 * 8);
        }
    }

    /// Makes the written bytes durable.
    pub(super) fn sync(&mut self) {
        self.durable.set_len(self.visible.len);
        for page in std::mem::take(&mut self.dirty) {
            if let (Some(to), Some(from)) =
                (self.durable.pages.get_mut(page), self.visible.pages.get(page))
            {
                to.clone_from(from);
            }
        }
    }

    /// Returns the disk space that the file takes, in bytes.
    pub(super) fn occupied_bytes(&self) -> u64 {
        self.visible.len.max(self.reserved)
    }

    /// Returns one of the states that a power cut may leave: each written sector and the length are
    /// old or new, as `random` decides.
    pub(super) fn random_torn_contents(&self, random: &SeededEntropy) -> Contents {
        let mut out = self.durable.clone();
        out.set_len(if random.below(2) == 0 { self.durable.len } else { self.visible.len });
        for (at, page) in out.pages.iter_mut().enumerate().filter(|(at, _)| self.dirty.contains(at))
        {
            let Some(seen) = self.visible.pages.get(at) else { continue };
            let sectors = Arc::make_mut(page).chunks_mut(SECTOR).zip(seen.chunks(SECTOR));
            for (to, from) in sectors.filter(|_| random.below(2) == 1) {
                to.copy_from_slice(from);
            }
        }
        out.set_len(out.len); // clears the bytes of new sectors past the old length
        out
    }
}

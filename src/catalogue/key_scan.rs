//! A scan over all keys of the catalogue that begin with a prefix.

use std::vec;

use crate::catalogue::{Catalogue, CatalogueError, Entry, MAX_PAGE};

/// A scan in the order of the keys. It holds one page in memory. A change is visible if it is made
/// before the scan reads the page with the key.
pub struct KeyScan<'a> {
    catalogue: &'a dyn Catalogue,
    prefix: String,
    after: Option<String>,
    page: vec::IntoIter<(String, Entry)>,
}

impl<'a> KeyScan<'a> {
    /// Returns a scan over all keys of `prefix`.
    pub fn of_prefix(catalogue: &'a dyn Catalogue, prefix: impl Into<String>) -> Self {
        Self { catalogue, prefix: prefix.into(), after: None, page: Vec::new().into_iter() }
    }

    /// Restricts the scan to the keys after `key`.
    pub fn starting_after(self, key: String) -> Self {
        Self { after: Some(key), ..self }
    }

    /// Returns the next key and its entry, or `None` after the last key.
    pub async fn next(&mut self) -> Result<Option<(String, Entry)>, CatalogueError> {
        if self.page.len() == 0 {
            let after = self.after.as_deref();
            let page = self.catalogue.list_entries(&self.prefix, after, MAX_PAGE).await?;
            let Some((last, _)) = page.last() else { return Ok(None) };
            self.after = Some(last.clone());
            self.page = page.into_iter();
        }
        Ok(self.page.next())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::catalogue::local::LocalCatalogue;
    use crate::clock::SystemClock;
    use crate::entropy::SeededEntropy;
    use crate::id::Epoch;
    use crate::store::MemoryKv;
    use crate::workers::Workers;

    #[tokio::test]
    async fn every_key_comes_once_and_none_of_another_prefix() {
        let (kv, clock) = (Arc::new(MemoryKv::new()), SystemClock::new());
        let (entropy, workers) = (Arc::new(SeededEntropy::new(1)), Workers::inline());
        let lease = Duration::from_secs(10);
        let catalogue =
            LocalCatalogue::open(kv, clock, entropy, &workers, lease, Epoch::default()).unwrap();
        let keys: Vec<String> =
            (0..2 * MAX_PAGE + 1).map(|number| format!("k/{number:08}")).collect();
        for key in keys.iter().map(String::as_str).chain(["j/1", "l/1"]) {
            catalogue.compare_and_set(key, None, Some(vec![1])).await.unwrap();
        }
        let mut walk = KeyScan::of_prefix(&catalogue, "k/");
        let mut found = Vec::new();
        while let Some((key, _)) = walk.next().await.unwrap() {
            found.push(key);
        }
        assert_eq!(found, keys);
        let mut rest = KeyScan::of_prefix(&catalogue, "k/").starting_after(keys[499].clone());
        assert_eq!(rest.next().await.unwrap().unwrap().0, keys[500]);
        assert_eq!(KeyScan::of_prefix(&catalogue, "m/").next().await.unwrap(), None);
    }
}

//! The progress of long work on stderr: bytes, rate, time left.
//!
//! No progress is shown when stderr is not a terminal, or for work of less than two seconds. The
//! counts serve the display only.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Work that ends sooner shows no bar.
pub const SHOWN_AFTER: Duration = Duration::from_secs(2);

const KNOWN: &str = "{prefix:<18} {bar:30} {percent:>3}%  {binary_bytes} of {binary_total_bytes}  \
                     {binary_bytes_per_sec}  {eta} left  {msg}";
const UNKNOWN: &str =
    "{prefix:<18} {spinner} {binary_bytes}  {binary_bytes_per_sec}  {elapsed}  {msg}";

/// A progress bar that appears once the work turns out to be long and disappears when it ends.
#[derive(Debug)]
pub struct ProgressLine {
    bar: ProgressBar,
    target: std::sync::Mutex<Option<ProgressDrawTarget>>,
}

impl ProgressLine {
    /// Creates a bar labelled `what`, over `total_bytes` if that is known. `watched` is
    /// [`super::printer::Look::watched`].
    pub fn new(watched: bool, what: impl Into<String>, total_bytes: Option<u64>) -> Self {
        let target = watched.then(|| ProgressDrawTarget::stderr_with_hz(10));
        Self::on(target, what.into(), total_bytes)
    }

    fn on(target: Option<ProgressDrawTarget>, what: String, total_bytes: Option<u64>) -> Self {
        let bar = ProgressBar::with_draw_target(total_bytes, ProgressDrawTarget::hidden());
        let template = if total_bytes.is_some() { KNOWN } else { UNKNOWN };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(what);
        Self { bar, target: target.into() }
    }

    /// Adds `bytes` to the bytes that are done.
    pub fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
        self.show_if_long();
    }

    /// Sets the bytes that are done in all, and the detail that is being worked on.
    pub fn set(&self, bytes: u64, detail: &str) {
        self.bar.set_position(bytes);
        self.bar.set_message(super::table::shown(detail).into_owned());
        self.show_if_long();
    }

    /// Sets the total once it is known, in bytes.
    pub fn set_total(&self, total_bytes: u64) {
        self.bar.set_length(total_bytes);
        if let Ok(style) = ProgressStyle::with_template(KNOWN) {
            self.bar.set_style(style.progress_chars("=> "));
        }
    }

    /// Returns the bytes that are done so far.
    pub fn done_bytes(&self) -> u64 {
        self.bar.position()
    }

    /// Runs `work`, which writes to stderr, while the bar is not there.
    pub fn suspend(&self, work: impl FnOnce()) {
        self.bar.suspend(work);
    }

    fn show_if_long(&self) {
        if self.bar.elapsed() < SHOWN_AFTER {
            return;
        }
        let mut target = self.target.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(target) = target.take() {
            self.bar.set_draw_target(target);
            // From here on the bar redraws itself, so that stalled work is visible as such.
            self.bar.enable_steady_tick(Duration::from_millis(200));
        }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use indicatif::TermLike;

    use super::*;

    #[derive(Debug, Clone, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            120
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    fn progress(screen: &Screen, elapsed: Duration) -> ProgressLine {
        let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
        let mut progress = ProgressLine::on(Some(target), "restore".to_owned(), Some(64 << 20));
        progress.bar = progress.bar.clone().with_elapsed(elapsed);
        progress
    }

    #[test]
    fn short_work_shows_nothing() {
        let screen = Screen::default();
        let short = progress(&screen, Duration::ZERO);
        short.add(1 << 20);
        short.bar.force_draw();
        assert_eq!(short.done_bytes(), 1 << 20);
        drop(short);
        assert_eq!(*screen.0.lock().unwrap(), "");
    }

    #[test]
    fn long_work_shows_bytes_rate_and_time_left() {
        let screen = Screen::default();
        let long = progress(&screen, SHOWN_AFTER);
        long.set(32 << 20, "shard \u{1b}[2J");
        long.add(0);
        long.bar.force_draw();
        let drawn = screen.0.lock().unwrap().clone();
        for part in ["restore", "50%", "32.00 MiB of 64.00 MiB", "/s", "left", "shard \\u{1b}[2J"] {
            assert!(drawn.contains(part), "{part:?} in {drawn:?}");
        }
    }

    #[test]
    fn nobody_watching_means_no_bar() {
        let hidden = ProgressLine::new(false, "save", None);
        hidden.bar.set_elapsed(SHOWN_AFTER);
        hidden.add(5);
        hidden.set_total(10);
        assert!(hidden.bar.is_hidden() && hidden.done_bytes() == 5);
    }
}

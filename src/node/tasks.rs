//! The tasks of a node, which end when the node stops.

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The tasks of a node, and the token that stops them.
#[derive(Default)]
pub(in crate::node) struct Tasks {
    stop: CancellationToken,
    tracker: TaskTracker,
}

impl Tasks {
    /// Spawns `work`, which runs to its end, also while the node stops. Returns the handle of its
    /// task.
    pub(in crate::node) fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.tracker.spawn(work)
    }

    /// Spawns `work`, which is cancelled when the node stops. Returns the handle of its task.
    pub(in crate::node) fn spawn_until_stop(
        &self,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        let stop = self.stop.clone();
        self.tracker.spawn(async move {
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = work => {}
            }
        })
    }

    /// Returns a token that is cancelled when the node stops. Cancelling it stops nothing else.
    pub(in crate::node) fn stop_token(&self) -> CancellationToken {
        self.stop.child_token()
    }

    /// Cancels the tasks of [`spawn_until_stop`](Self::spawn_until_stop), also those that are
    /// spawned later. The others run to their end.
    pub(in crate::node) fn stop(&self) {
        self.stop.cancel();
        self.tracker.close();
    }

    /// Waits until [`stop`](Self::stop) is called.
    pub(in crate::node) async fn wait_for_stop(&self) {
        self.stop.cancelled().await;
    }

    /// Waits until all tasks have ended after [`stop`](Self::stop).
    pub(in crate::node) async fn wait_until_ended(&self) {
        self.tracker.wait().await;
    }
}

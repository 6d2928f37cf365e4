//! A proxy between one node and all others. It answers at the node's address and forwards all
//! traffic, except for the changes that a [`Change`] makes to it.

use std::sync::Arc;

use bytes::Bytes;
use rapidraid::net::frame::{FramedRecv, write_frame};
use rapidraid::net::{
    Address, Connection, NetError, Peer, RecvStream, Role, SendStream, Transport,
};
use rapidraid::wire::MAX_FRAME_BYTES;
use tokio::task::JoinHandle;

use super::{World, address};

/// The changes that a proxy makes to the traffic that it forwards. By default it changes nothing.
pub trait Change: Send + Sync + 'static {
    /// Returns the first frame of the answer to call `number`, as the caller is to receive it.
    fn answer(&self, number: u8, frame: Bytes) -> Bytes {
        let _ = number;
        frame
    }

    /// Returns the bytes after that frame, as the caller is to receive them.
    fn bulk(&self, number: u8, bytes: Bytes) -> Bytes {
        let _ = number;
        bytes
    }

    /// Returns the bytes of a hop's stream to the node, after the stream's header, as the node is
    /// to receive them.
    fn stream(&self, bytes: Bytes) -> Bytes {
        bytes
    }
}

/// A running proxy. Dropping it ends the forwarding.
pub struct Between(JoinHandle<()>);

impl Drop for Between {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl World {
    /// Restarts the daemon of machine `index` behind a proxy that takes the daemon's address.
    /// Returns the proxy.
    pub async fn between(&mut self, index: usize, change: impl Change) -> Between {
        self.kill(index).await;
        let door = format!("behind{index:02}:7440");
        self.doors.insert(index, door.clone());
        self.boot(index);
        let name = self.machines[index].name.clone();
        let front =
            self.network.join(Peer { role: Role::Node, name: name.clone() }, &address(index));
        let peer = Peer { role: Role::Node, name: format!("between{index:02}").parse().unwrap() };
        let back = self.network.join(peer, &format!("between{index:02}:7440"));
        let (change, to) = (Arc::new(change), Address { host_port: door, node: Some(name) });
        Between(tokio::spawn(async move {
            while let Some(outside) = front.accept().await {
                let Ok(inside) = back.connect(&to).await else { continue };
                tokio::spawn(pass_on(outside, inside, change.clone()));
            }
        }))
    }
}

async fn pass_on(
    outside: Arc<dyn Connection>,
    inside: Arc<dyn Connection>,
    change: Arc<impl Change>,
) {
    loop {
        tokio::select! {
            biased;
            () = inside.closed() => break,
            stream = outside.accept_uni() => {
                let (Ok(recv), Ok(send)) = (stream, inside.open_uni().await) else { break };
                tokio::spawn(hop_stream(FramedRecv::new(recv), send, change.clone()));
            }
            stream = outside.accept_bi() => {
                let (Ok(asker), Ok(asked)) = (stream, inside.open_bi().await) else { break };
                tokio::spawn(call(asker, asked, change.clone()));
            }
        }
    }
    outside.close(0, "");
    inside.close(0, "");
}

type Both = (Box<dyn SendStream>, Box<dyn RecvStream>);

async fn call(asker: Both, asked: Both, change: Arc<impl Change>) -> Result<(), NetError> {
    let (mut to_asker, from_asker) = asker;
    let (mut to_asked, from_asked) = asked;
    let (mut request, mut answer) = (FramedRecv::new(from_asker), FramedRecv::new(from_asked));
    let Some(frame) = request.read_frame(MAX_FRAME_BYTES).await? else { return Ok(()) };
    let number = frame.first().copied().unwrap_or_default();
    write_frame(&mut *to_asked, MAX_FRAME_BYTES, frame).await?;
    let there = raw(request, to_asked, |bytes| bytes);
    let back = async {
        if let Some(frame) = answer.read_frame(MAX_FRAME_BYTES).await? {
            write_frame(&mut *to_asker, MAX_FRAME_BYTES, change.answer(number, frame)).await?;
        }
        raw(answer, to_asker, |bytes| change.bulk(number, bytes)).await
    };
    tokio::try_join!(there, back)?;
    Ok(())
}

async fn hop_stream(
    mut recv: FramedRecv,
    mut send: Box<dyn SendStream>,
    change: Arc<impl Change>,
) -> Result<(), NetError> {
    let Some(header) = recv.read_frame(MAX_FRAME_BYTES).await? else { return Ok(()) };
    write_frame(&mut *send, MAX_FRAME_BYTES, header).await?;
    raw(recv, send, |bytes| change.stream(bytes)).await
}

/// Forwards the rest of a stream, and the way it ends.
async fn raw(
    mut recv: FramedRecv,
    mut send: Box<dyn SendStream>,
    change: impl Fn(Bytes) -> Bytes,
) -> Result<(), NetError> {
    loop {
        match recv.read_some(64 << 10).await {
            Ok(Some(bytes)) => {
                if let Err(error) = send.write(change(bytes)).await {
                    if let NetError::Stopped { code } = error {
                        recv.stop(code);
                    }
                    return Err(error);
                }
            }
            Ok(None) => return send.finish().await,
            Err(error) => {
                if let NetError::Reset { code } = error {
                    send.reset(code);
                }
                return Err(error);
            }
        }
    }
}

//! One test suite for every transport, so that code that runs within one process also runs over
//! QUIC; and tests of the features that only QUIC has: certificates, sockets, datagrams.

#[path = "net/pair.rs"]
mod pair;
#[path = "net/quic.rs"]
mod quic;

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use rapidraid::clock::{SystemClock, deadline};
use rapidraid::kind::ErrorKind;
use rapidraid::net::frame::{FramedRecv, write_frame};
use rapidraid::net::{ABANDONED, NetError, RecvStream, Role, SendStream};

use pair::{World, memory, over_quic};

/// Runs `work` with a deadline: a test that hangs fails.
async fn in_time<T>(work: impl Future<Output = T>) -> T {
    deadline(&*SystemClock::new(), Duration::from_secs(60), work).await.expect("it stands still")
}

/// Returns `len` bytes with a period that differs from the size of every window and datagram.
fn pattern(len: usize) -> Bytes {
    (0..len).map(|i| (i % 251) as u8).collect()
}

async fn read_all(recv: &mut dyn RecvStream) -> Result<Vec<u8>, NetError> {
    let mut all = Vec::new();
    while let Some(part) = recv.read(1 << 16).await? {
        all.extend_from_slice(&part);
    }
    Ok(all)
}

async fn first_error(send: &mut dyn SendStream) -> NetError {
    loop {
        if let Err(error) = send.write(pattern(1 << 16)).await {
            return error;
        }
    }
}

async fn peers_are_proven(world: World) {
    assert_eq!(world.client.peer().to_string(), "node a");
    assert_eq!(world.node.peer().to_string(), "client c");
    assert_eq!(world.node.peer().role, Role::Client);
}

async fn bytes_pass_both_ways_and_end(world: World) {
    let (mut ask, mut answer) = world.client.open_bi().await.unwrap();
    ask.write(Bytes::from_static(b"question")).await.unwrap();
    ask.write(Bytes::new()).await.unwrap();
    ask.finish().await.unwrap();
    assert_eq!(ask.write(Bytes::from_static(b"x")).await, Err(NetError::Ended));
    assert_eq!(ask.finish().await, Err(NetError::Ended));
    let (mut reply, mut asked) = world.node.accept_bi().await.unwrap();
    assert_eq!(read_all(&mut *asked).await.unwrap(), b"question");
    assert_eq!(asked.read(10).await, Ok(None));
    reply.write(Bytes::from_static(b"answer")).await.unwrap();
    reply.finish().await.unwrap();
    assert_eq!(read_all(&mut *answer).await.unwrap(), b"answer");

    let mut news = world.node.open_uni().await.unwrap();
    news.write(Bytes::from_static(b"news")).await.unwrap();
    news.finish().await.unwrap();
    drop(news);
    let mut heard = world.client.accept_uni().await.unwrap();
    assert_eq!(heard.read(2).await.unwrap().unwrap(), "ne");
    assert_eq!(heard.read(0).await.unwrap().unwrap(), "w");
    assert_eq!(read_all(&mut *heard).await.unwrap(), b"s");
}

async fn streams_show_with_their_first_use_in_order(world: World) {
    let mut first = world.client.open_uni().await.unwrap();
    let mut second = world.client.open_uni().await.unwrap();
    let (third, _) = world.client.open_bi().await.unwrap();
    second.write(Bytes::from_static(b"2")).await.unwrap();
    let mut seen_first = world.node.accept_uni().await.unwrap();
    let mut seen_second = world.node.accept_uni().await.unwrap();
    assert_eq!(seen_second.read(9).await.unwrap().unwrap(), "2");
    first.write(Bytes::from_static(b"1")).await.unwrap();
    assert_eq!(seen_first.read(9).await.unwrap().unwrap(), "1");
    // A stream that is dropped before its first write still reaches the peer, as an abandoned one.
    drop(third);
    let (_back, mut seen_third) = world.node.accept_bi().await.unwrap();
    assert_eq!(seen_third.read(9).await, Err(NetError::Reset { code: ABANDONED }));
}

/// Asserts that `work` waits while other streams of the connection transfer bytes in both
/// directions.
async fn assert_waits<T>(world: &World, work: impl Future<Output = T>) {
    let client = async {
        for round in 0..50 {
            let (mut send, mut recv) = world.client.open_bi().await.unwrap();
            send.write(Bytes::from(vec![round; 1000])).await.unwrap();
            send.finish().await.unwrap();
            assert_eq!(read_all(&mut *recv).await.unwrap(), vec![round; 1000]);
        }
    };
    let node = async {
        for _ in 0..50 {
            let (mut send, mut recv) = world.node.accept_bi().await.unwrap();
            send.write(read_all(&mut *recv).await.unwrap().into()).await.unwrap();
            send.finish().await.unwrap();
        }
    };
    tokio::select! {
        _ = work => panic!("it did not wait"),
        _ = async { tokio::join!(client, node) } => {}
    }
}

async fn a_writer_waits_for_its_reader_and_stops_no_other_stream(world: World) {
    let mut send = world.client.open_uni().await.unwrap();
    send.write(pattern(1)).await.unwrap();
    let mut recv = world.node.accept_uni().await.unwrap();
    let mut written = 1;
    let filling = async {
        while written < 16 << 20 {
            send.write(pattern(1 << 16)).await.unwrap();
            written += 1 << 16;
        }
    };
    assert_waits(&world, filling).await;
    assert!(written <= 2 << 20, "{written} bytes were taken from the writer and nobody read");
    drop(send);
    assert_eq!(read_all(&mut *recv).await, Err(NetError::Reset { code: ABANDONED }));
}

async fn resets_carry_their_code(world: World) {
    let fenced = ErrorKind::Fenced.wire_code();
    let mut send = world.client.open_uni().await.unwrap();
    send.write(pattern(1000)).await.unwrap();
    let mut recv = world.node.accept_uni().await.unwrap();
    recv.read(1).await.unwrap();
    send.reset(fenced);
    assert_eq!(send.write(pattern(1)).await, Err(NetError::Ended));
    let error = read_all(&mut *recv).await.unwrap_err();
    assert_eq!(
        (error.clone(), error.kind()),
        (NetError::Reset { code: fenced }, ErrorKind::Fenced)
    );
    assert_eq!(recv.read(1).await, Err(error));

    let mut dropped = world.client.open_uni().await.unwrap();
    dropped.write(pattern(10)).await.unwrap();
    drop(dropped);
    let mut recv = world.node.accept_uni().await.unwrap();
    assert_eq!(read_all(&mut *recv).await, Err(NetError::Reset { code: ABANDONED }));

    let mut whole = world.client.open_uni().await.unwrap();
    whole.write(pattern(10)).await.unwrap();
    whole.finish().await.unwrap();
    whole.reset(fenced);
    let mut recv = world.node.accept_uni().await.unwrap();
    assert_eq!(read_all(&mut *recv).await.unwrap(), pattern(10));
}

async fn stops_carry_their_code(world: World) {
    let busy = ErrorKind::Busy.wire_code();
    let mut send = world.client.open_uni().await.unwrap();
    send.write(pattern(1)).await.unwrap();
    let mut recv = world.node.accept_uni().await.unwrap();
    recv.stop(busy);
    assert_eq!(recv.read(1).await, Err(NetError::Ended));
    let error = first_error(&mut *send).await;
    assert_eq!((error.clone(), error.kind()), (NetError::Stopped { code: busy }, ErrorKind::Busy));

    let mut send = world.client.open_uni().await.unwrap();
    send.write(pattern(1)).await.unwrap();
    drop(world.node.accept_uni().await.unwrap());
    assert_eq!(first_error(&mut *send).await, NetError::Stopped { code: ABANDONED });
    send.finish().await.unwrap();
}

async fn a_large_transfer_arrives_whole(world: World) {
    transfer(&world, 32 << 20).await;
}

/// Sends `total_bytes` to the node. The node answers with their hash.
async fn transfer(world: &World, total_bytes: usize) {
    let chunk = pattern(1 << 20);
    let client = async {
        let (mut send, mut recv) = world.client.open_bi().await.unwrap();
        let mut hash = blake3::Hasher::new();
        for _ in 0..total_bytes / chunk.len() {
            hash.update(&chunk);
            send.write(chunk.clone()).await.unwrap();
        }
        send.finish().await.unwrap();
        assert_eq!(read_all(&mut *recv).await.unwrap(), hash.finalize().as_bytes());
    };
    let node = async {
        let (mut send, mut recv) = world.node.accept_bi().await.unwrap();
        let mut hash = blake3::Hasher::new();
        while let Some(part) = recv.read(1 << 20).await.unwrap() {
            hash.update(&part);
        }
        send.write(Bytes::copy_from_slice(hash.finalize().as_bytes())).await.unwrap();
        send.finish().await.unwrap();
    };
    tokio::join!(client, node);
}

async fn many_streams_wait_for_their_turn(world: World) {
    const STREAMS: usize = 1000;
    let client = async {
        let mut tasks = tokio::task::JoinSet::new();
        for index in 0..STREAMS {
            let connection = world.client.clone();
            tasks.spawn(async move {
                let (mut send, mut recv) = connection.open_bi().await.unwrap();
                send.write(Bytes::from(index.to_string())).await.unwrap();
                send.finish().await.unwrap();
                assert_eq!(read_all(&mut *recv).await.unwrap(), index.to_string().as_bytes());
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
    };
    let node = async {
        for _ in 0..STREAMS {
            let (mut send, mut recv) = world.node.accept_bi().await.unwrap();
            let echo = read_all(&mut *recv).await.unwrap();
            send.write(echo.into()).await.unwrap();
            send.finish().await.unwrap();
        }
    };
    tokio::join!(client, node);
}

async fn open_streams_are_bounded(world: World) {
    let mut open = Vec::new();
    for _ in 0..64 {
        open.push(world.client.open_uni().await.unwrap());
    }
    assert_waits(&world, world.client.open_uni()).await;
    // Streams that have ended on both sides make room for new ones.
    drop(open);
    for _ in 0..64 {
        let mut recv = world.node.accept_uni().await.unwrap();
        assert_eq!(recv.read(1).await, Err(NetError::Reset { code: ABANDONED }));
    }
    world.client.open_uni().await.unwrap();
}

async fn frames_and_bulk_share_a_stream(world: World) {
    let bulk = pattern(400_000);
    let client = async {
        let (mut send, _recv) = world.client.open_bi().await.unwrap();
        write_frame(&mut *send, 64, pattern(64)).await.unwrap();
        send.write(bulk.clone()).await.unwrap();
        write_frame(&mut *send, 1 << 20, pattern(100_000)).await.unwrap();
        let error = write_frame(&mut *send, 64, pattern(65)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        // A hostile peer sends the length of a frame that no node accepts.
        send.write(Bytes::from_static(&[0xff; 4])).await.unwrap();
        send.finish().await.unwrap();
    };
    let node = async {
        let (_back, recv) = world.node.accept_bi().await.unwrap();
        let mut recv = FramedRecv::new(recv);
        assert_eq!(recv.read_frame(64).await.unwrap().unwrap(), pattern(64));
        assert_eq!(recv.read_exact(65_536).await.unwrap(), bulk[..65_536]);
        let mut rest = vec![0; bulk.len() - 65_536];
        recv.read_into(&mut rest).await.unwrap();
        assert_eq!(rest, bulk[65_536..]);
        assert_eq!(recv.read_frame(1 << 20).await.unwrap().unwrap(), pattern(100_000));
        let wrong = NetError::FrameTooLong { len_bytes: 0xffff_ffff, limit_bytes: 1 << 20 };
        assert_eq!(recv.read_frame(1 << 20).await, Err(wrong));
    };
    tokio::join!(client, node);
}

async fn closing_tells_the_other_side_why(world: World) {
    let mut waiting = world.client.open_uni().await.unwrap();
    waiting.write(pattern(1)).await.unwrap();
    world.node.close(ErrorKind::Fenced.wire_code(), "a newer one is here");
    world.node.close(1, "the first close wins");
    world.client.closed().await;
    assert!(world.client.is_closed() && world.node.is_closed());
    let errors = [
        first_error(&mut *waiting).await,
        world.client.open_uni().await.err().unwrap(),
        world.client.accept_bi().await.err().unwrap(),
    ];
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Fenced);
        assert!(error.to_string().contains("node a"), "{error}");
        assert!(error.to_string().contains("a newer one is here"), "{error}");
    }
    let ours = world.node.open_bi().await.err().unwrap();
    assert!(matches!(ours, NetError::Closed { code: None, .. }), "{ours}");
}

async fn a_connection_lives_as_long_as_its_streams(world: World) {
    let World { client, node, client_transport: _keep, node_transport: _stay, .. } = world;
    let mut send = client.open_uni().await.unwrap();
    send.write(pattern(5)).await.unwrap();
    let mut recv = node.accept_uni().await.unwrap();
    drop(client);
    send.write(pattern(5)).await.unwrap();
    send.finish().await.unwrap();
    assert_eq!(read_all(&mut *recv).await.unwrap().len(), 10);
    drop((send, recv));
    node.closed().await;
}

async fn a_closed_transport_ends_everything(world: World) {
    let accepting = world.node_transport.clone();
    let accepting = tokio::spawn(async move { accepting.accept().await.is_none() });
    world.node_transport.close().await;
    assert!(accepting.await.unwrap());
    world.client.closed().await;
    assert!(world.node_transport.accept().await.is_none());
    assert!(world.client_transport.connect(&world.address).await.is_err());
    let error = world.node_transport.connect(&world.address).await.err().unwrap();
    assert_eq!(error, NetError::ShutDown);
}

async fn a_client_accepts_nothing(world: World) {
    world.client_transport.close().await;
    assert!(world.client_transport.accept().await.is_none());
}

async fn another_node_than_the_expected_is_refused(world: World) {
    let mut wrong = world.address.clone();
    wrong.node = Some("b".parse().unwrap());
    let error = world.client_transport.connect(&wrong).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.to_string().contains("is node a, not b"), "{error}");
    let mut any = world.address.clone();
    any.node = None;
    let (client, node) = tokio::join!(world.client_transport.connect(&any), world.accept_live());
    assert_eq!(client.unwrap().peer().to_string(), "node a");
    assert_eq!(node.peer().to_string(), "client c");
}

macro_rules! suite {
    ($($test:ident)*) => {
        mod on_memory {
            $(#[tokio::test] async fn $test() { crate::in_time(async { crate::$test(crate::memory().await).await }).await })*
        }
        mod on_quic {
            $(#[tokio::test] async fn $test() { crate::in_time(async { crate::$test(crate::over_quic().await).await }).await })*
        }
    };
}

suite! {
    peers_are_proven
    bytes_pass_both_ways_and_end
    streams_show_with_their_first_use_in_order
    a_writer_waits_for_its_reader_and_stops_no_other_stream
    resets_carry_their_code
    stops_carry_their_code
    a_large_transfer_arrives_whole
    many_streams_wait_for_their_turn
    open_streams_are_bounded
    frames_and_bulk_share_a_stream
    closing_tells_the_other_side_why
    a_connection_lives_as_long_as_its_streams
    a_closed_transport_ends_everything
    a_client_accepts_nothing
    another_node_than_the_expected_is_refused
}

//! `slat-pager share`: serves snapshots to other pagers.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::{CommandError, TlsArgs, print_line};
use crate::snapshot::{OpenWith, SnapshotName};
use crate::source::SourceError;
use crate::source::cache::{BlockCache, CacheOptions};
use crate::source::peer::{LocalAddress, PeerServer};

/// Serve snapshots to other pagers, over TCP with TLS, or to processes of this host. They open them
/// as peer:HOST:PORT/NAME or peer:unix:PATH/NAME.
#[derive(Args, Clone, Debug)]
pub struct ShareArgs {
    /// What is served, and how peers call it
    #[arg(required = true, value_name = "NAME=SNAPSHOT", value_parser = parse_shared)]
    shared: Vec<(String, SnapshotName)>,
    /// Where to listen: ADDRESS:PORT, or unix:PATH for processes that may write that socket
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Listen,
    #[command(flatten)]
    tls: TlsArgs,
}

/// Where to listen.
#[derive(Clone, Debug)]
enum Listen {
    Local(LocalAddress),
    Tls(SocketAddr),
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Listen, String> {
        match text.parse::<SocketAddr>() {
            Ok(address) => Ok(Listen::Tls(address)),
            Err(_) => text.parse().map(Listen::Local).map_err(|_| "it should be ADDRESS:PORT or unix:PATH".to_string()),
        }
    }
}

fn parse_shared(text: &str) -> Result<(String, SnapshotName), String> {
    let (name, snapshot) = text.split_once('=').ok_or("it should be NAME=SNAPSHOT")?;
    if name.is_empty() || name.len() > 255 {
        return Err("the name is empty or too long".to_string());
    }
    Ok((name.to_string(), snapshot.parse().map_err(|error: crate::snapshot::NameError| error.to_string())?))
}

/// Serves until a signal ends it.
///
/// # Errors
/// A snapshot cannot be opened; the address or the certificates cannot be used; nothing can be printed.
pub async fn run(args: &ShareArgs) -> Result<(), CommandError> {
    let tls = args.tls.files();
    let cache = BlockCache::new(&CacheOptions::default())?;
    let with = OpenWith { cache: Some(cache), tls: tls.clone(), ..OpenWith::default() };
    let mut snapshots = HashMap::new();
    for (name, snapshot) in &args.shared {
        let source = snapshot.open(&with).await?;
        if snapshots.insert(name.clone(), Arc::clone(&source)).is_some() {
            return Err(CommandError::Usage(format!("two snapshots have the name {name}")));
        }
    }
    let server = match &args.listen {
        Listen::Local(address) => {
            let server = PeerServer::bind_local(address, snapshots).await?;
            print_line(format_args!("listening at {address}"))?;
            server
        }
        Listen::Tls(address) => {
            let tls = tls.ok_or_else(|| {
                let needed = "--certificates, --key and --authorities are needed";
                CommandError::Usage(format!(
                    "--listen {address}: peers of other hosts are told apart by certificates: {needed}"
                ))
            })?;
            let server = PeerServer::bind(*address, &tls, snapshots).await?;
            if let Ok(address) = server.address() {
                print_line(format_args!("listening at {address}"))?;
            }
            server
        }
    };
    // Either signal ends it in order: the file of a socket goes with it.
    let mut end = signal(SignalKind::terminate())
        .map_err(|error| SourceError::Io { what: "wait for signals".to_string(), error })?;
    tokio::select! {
        () = server.serve() => {}
        _ = tokio::signal::ctrl_c() => {}
        _ = end.recv() => {}
    }
    Ok(())
}

//! The command `slat-pager`.

#![expect(unsafe_code, reason = "descriptors that the process was started with")]

use std::process::ExitCode;

use clap::Parser;
use slat_pager::bench;
use slat_pager::commands;
use slat_pager::daemon::listen::Passed;
use slat_pager::daemon::takeover::Standby;
use slat_pager::options::{Arguments, Command, LogFormat, Serve};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

fn main() -> ExitCode {
    // SAFETY: the first statement of the process.
    let passed = unsafe { Passed::take() };
    let arguments = Arguments::parse();
    start_log(&arguments);
    let result = match &arguments.command {
        Command::Serve(serve) => run_serve(serve, passed).map(|()| ExitCode::SUCCESS),
        Command::Store(options) => commands::cloud_hypervisor::store(options).map(|()| ExitCode::SUCCESS),
        Command::Restore(options) => commands::cloud_hypervisor::restore(options).map(|()| ExitCode::SUCCESS),
        Command::Pack(pack) => wait_for(commands::pack::run(pack)).map(|()| ExitCode::SUCCESS),
        Command::Inspect(inspect) => wait_for(commands::inspect::run(inspect)).map(|()| ExitCode::SUCCESS),
        Command::Verify(verify) => wait_for(commands::verify::run(verify)),
        Command::Share(share) => wait_for(commands::share::run(share)).map(|()| ExitCode::SUCCESS),
        Command::Bench(options) => bench::run(options).map(|()| ExitCode::SUCCESS).map_err(Into::into),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("slat-pager: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs what waits for files and servers.
fn wait_for<T>(
    work: impl Future<Output = Result<T, slat_pager::source::SourceError>>,
) -> Result<T, Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    Ok(runtime.block_on(work)?)
}

fn run_serve(serve: &Serve, passed: Passed) -> Result<(), Box<dyn std::error::Error>> {
    let config = serve.config()?;
    let standby = if serve.standby { Standby::Wait } else { Standby::No };
    Ok(slat_pager::daemon::serve(&config, standby, passed)?)
}

fn start_log(arguments: &Arguments) {
    let registry = tracing_subscriber::registry().with(arguments.log.clone());
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    match arguments.log_format {
        LogFormat::Text => registry.with(lines).init(),
        LogFormat::Json => registry.with(lines.json()).init(),
    }
}

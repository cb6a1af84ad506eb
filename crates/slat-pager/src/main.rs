//! The command `slat-pager`.

#![expect(unsafe_code, reason = "descriptors that the process was started with")]

use std::error::Error;
use std::io::{self, IsTerminal};
use std::process::ExitCode;

use clap::Parser;
use slat_pager::bench;
use slat_pager::commands::{self, CommandError};
use slat_pager::config::ConfigError;
use slat_pager::daemon::listen::Passed;
use slat_pager::daemon::takeover::Standby;
use slat_pager::options::{Arguments, Command, LogFormat, Serve};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// The exit code where what was asked for cannot be done.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    // SAFETY: the first statement of the process.
    let passed = unsafe { Passed::take() };
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        // A help, or what is wrong.
        Err(error) => {
            let code = if error.use_stderr() { USAGE } else { 0 };
            return match error.print() {
                Err(error) if error.kind() != io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
                _ => ExitCode::from(code),
            };
        }
    };
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
            let is_usage = matches!(error.downcast_ref(), Some(CommandError::Usage(_))) || error.is::<ConfigError>();
            if is_usage { ExitCode::from(USAGE) } else { ExitCode::FAILURE }
        }
    }
}

/// Runs what waits for files and servers.
fn wait_for<T>(work: impl Future<Output = Result<T, CommandError>>) -> Result<T, Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    Ok(runtime.block_on(work)?)
}

fn run_serve(serve: &Serve, passed: Passed) -> Result<(), Box<dyn Error>> {
    let config = serve.config()?;
    let standby = if serve.standby { Standby::Wait } else { Standby::No };
    Ok(slat_pager::daemon::serve(&config, standby, passed)?)
}

fn start_log(arguments: &Arguments) {
    let registry = tracing_subscriber::registry().with(arguments.log.clone());
    let colors = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(colors);
    match arguments.log_format {
        LogFormat::Text => registry.with(lines).init(),
        LogFormat::Json => registry.with(lines.json()).init(),
    }
}

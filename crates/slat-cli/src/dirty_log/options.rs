//! Options of `slat dirty-log` for what runs beside the calls, and for the range.

use clap::Args;
use slat::Gfn;

use super::{DirtyLogArgs, Workload, slot_bytes};

/// What one word of the bitmap covers.
const WINDOW_UNIT: u64 = 64 << Gfn::SHIFT;

/// vCPUs beside a call, at most: each is a thread of each method.
const MAX_RUNNING: i64 = 64;

/// What runs beside the calls, and the windows of the range.
#[derive(Clone, Debug, Args)]
pub(crate) struct CallArgs {
    /// vCPUs that run beside each call [default: 1; migration: 0]
    ///
    /// They run guest code that only reads, in each method's VM. The guest of a migration runs in
    /// any case. With 0, no vCPU of the other workloads runs while the log is got.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(..=MAX_RUNNING), hide_short_help = true)]
    running_vcpus: Option<u16>,
    /// Windows of the range [default: 16M,256M,1G]
    ///
    /// Sizes of the windows in which the engine gets the log: multiples of 256K.
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = window_bytes, hide_short_help = true)]
    window: Option<Vec<u64>>,
}

impl DirtyLogArgs {
    pub(super) fn running_vcpus(&self) -> u16 {
        self.call.running_vcpus.unwrap_or(match self.workload {
            Workload::Table | Workload::Framebuffer | Workload::Range => 1,
            Workload::Migration => 0,
        })
    }

    pub(super) fn has_windows(&self) -> bool {
        self.call.window.is_some()
    }

    /// Sizes of the windows of the range, in pages.
    pub(super) fn windows(&self) -> Vec<u32> {
        let bytes = self.call.window.clone().unwrap_or_else(|| vec![16 << 20, 256 << 20, 1 << 30]);
        bytes.iter().map(|bytes| (bytes >> Gfn::SHIFT) as u32).collect()
    }

    /// Numbers of dirty pages of the range: sparse and dense.
    pub(super) fn range_pages(&self) -> Vec<u32> {
        self.pages.clone().unwrap_or_else(|| [512, 8].map(|part| (self.nr_pages() / part).max(1)).to_vec())
    }
}

/// A size that a window may have: whole words of the bitmap.
fn window_bytes(text: &str) -> Result<u64, String> {
    match slot_bytes(text)? {
        bytes if !bytes.is_multiple_of(WINDOW_UNIT) => Err("must be a multiple of 256K".to_owned()),
        bytes => Ok(bytes),
    }
}

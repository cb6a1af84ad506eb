//! What `slat compare` prints: Markdown, which is readable as it is.

use slat_machine::linux::topology::HostDescription;

use super::CompareArgs;
use super::comparison::{EMULATED, HARDWARE, HOST_CPUS, MODELLED};
use crate::results::{MODELLED_CPUS, SOFTWARE_CPUS};
use crate::statistics::CONFIDENCE;

/// The heading, and what the columns mean.
pub(super) fn head(args: &CompareArgs, host: &HostDescription) -> String {
    let command = if args.quick { "slat compare --quick" } else { "slat compare" };
    format!(
        "# {command}: the published systems, their baselines, slat, and the peers of this machine\n\n\
         {} CPUs, {}, Linux {}, {:.0} GiB of memory.\n\n\
         - A figure is the median over runs, with its quartiles. The speed-up of slat is the ratio of the medians of this run,\n  \
           with its interval of {:.0}% confidence: 2.00 is twice as good, 0.50 half. Published figures are shown for their proportions.\n\
         - {SOFTWARE_CPUS}: threads, memory, tables and contention are real, the guest's address translation is a program.\n  \
           {MODELLED}: a sum of times and counts measured there, and of given costs.\n  \
           {HOST_CPUS}: the call is timed as it is. {HARDWARE}: the KVM of this machine on its real CPUs.\n  \
           {MODELLED_CPUS}: the model of a large machine predicts what was published, in virtual time (`slat scale`). An error is\n  \
           the part by which a prediction is above what was published. Predictions decide nothing.\n\
         - {EMULATED}: counted on one CPU by an emulator, the same in each run (`slat metal --guest measure`, which\n  \
           saves KVM's).\n\
         - A claim is a comparison that slat must win. It is held if the whole interval and the ratio of the means lie above it,\n  \
           lost if both lie below, and a tie if this machine cannot tell, or the runs of a side deviate by more than their mean.\n  \
           The mean is that of the middle half of the runs, the deviation that of the median distance from the median. A side\n  \
           with *outliers* has runs so far off that all deviate by more than their mean; these decide nothing. The\n  \
           command fails if a claim is lost.\n\n",
        host.nr_cpus,
        host.cpu_model,
        host.kernel_release,
        host.memory_bytes as f64 / f64::from(1 << 30),
        CONFIDENCE * 100.0,
    )
}

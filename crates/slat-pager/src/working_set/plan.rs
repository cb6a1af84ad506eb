//! What a machine does with the file of a working set: it replays the one that is there, or records
//! one if there is none.
//!
//! # Guarantees
//! A file that is damaged, or of another snapshot, is as none: the next recording replaces it.
//! Nothing here is a failure of the machine.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::sync::oneshot;
use tracing::{info, warn};

use super::replay::{Populate, Progress, replay, steps};
use super::{Recorder, WorkingSet};
use crate::source::{Identity, Source};
use crate::vm::Observer;

/// A recording ends after this time, if the machine or the room for it does not before.
const RECORD_TIME: Duration = Duration::from_secs(60);

/// See the [module](self).
#[derive(Clone, Debug)]
pub enum Plan {
    /// Fill these pages in advance.
    Replay(WorkingSet),
    /// Note which pages are touched.
    Record(Arc<Recorder>),
    /// The machine is too large for a recording.
    Nothing,
}

impl Plan {
    /// For a machine whose memory is `source` and whose faults bring `granule_bytes`.
    pub fn for_source(file: &Path, source: &dyn Source, granule_bytes: u64) -> Plan {
        let around_bytes = granule_bytes.max(source.granule_bytes());
        let record =
            || Recorder::new(source.identity(), source.size_bytes(), around_bytes, super::record::DEFAULT_BYTES);
        Plan::new(file, source.identity(), || record().map(Arc::new))
    }

    /// For a machine whose snapshot is `identity`, with `recorder` if there is no file.
    pub fn new(file: &Path, identity: Identity, recorder: impl FnOnce() -> Option<Arc<Recorder>>) -> Plan {
        match WorkingSet::load(file, identity) {
            Ok(Some(set)) => return Plan::Replay(set),
            Ok(None) => {}
            Err(error) => warn!(file = %file.display(), %error, "the working set is recorded anew"),
        }
        recorder().map_or(Plan::Nothing, Plan::Record)
    }

    /// What observes the faults of the machine.
    pub fn observer(&self) -> Option<Arc<dyn Observer>> {
        match self {
            Plan::Record(recorder) => Some(Arc::clone(recorder) as _),
            Plan::Replay(_) | Plan::Nothing => None,
        }
    }

    /// Carries it out for a machine with `memory`, until it is done or the machine has `ended`.
    /// Counts in `progress`.
    pub async fn run(
        self,
        file: PathBuf,
        memory: Arc<dyn Populate + Send>,
        nr_threads: usize,
        progress: Arc<Progress>,
        ended: impl Future<Output = ()>,
    ) {
        match self {
            Plan::Replay(set) => {
                let counts = Arc::clone(&progress);
                let (done, mut replaying) = oneshot::channel();
                // None of the runtime's: reads need those, also the reads of replays.
                let thread = thread::Builder::new().name("slat-replay".to_string());
                let started = thread.spawn(move || {
                    // The receiver may be gone with its runtime.
                    let _ = done.send(replay(&steps(&set), &*memory, nr_threads, &counts));
                });
                if let Err(error) = started {
                    warn!(%error, "the working set is not replayed; pages come by faults");
                    return;
                }
                let replayed = tokio::select! {
                    replayed = &mut replaying => replayed,
                    () = ended => {
                        progress.stop();
                        replaying.await
                    }
                };
                match replayed {
                    Ok(Ok(())) if progress.is_stopped() => {
                        info!(
                            bytes = progress.done(),
                            of = progress.total(),
                            "the replay of the working set has stopped"
                        );
                    }
                    Ok(Ok(())) => info!(bytes = progress.done(), "the working set was replayed"),
                    Ok(Err(error)) => warn!(%error, "the replay of the working set ends; pages come by faults"),
                    Err(error) => warn!(%error, "the replay of the working set has failed"),
                }
            }
            Plan::Record(recorder) => {
                tokio::select! {
                    () = ended => {}
                    () = tokio::time::sleep(RECORD_TIME) => {}
                }
                let set = recorder.working_set();
                let nr_pages = set.pages.len();
                if nr_pages == 0 {
                    // It would be replayed for ever, and nothing recorded any more.
                    info!("the machine touched nothing: no working set is kept");
                    return;
                }
                let saved = tokio::task::spawn_blocking(move || set.save(&file)).await;
                match saved {
                    Ok(Ok(())) => info!(nr_pages, "the working set was recorded"),
                    Ok(Err(error)) => warn!(%error, "the working set cannot be kept"),
                    Err(error) => warn!(%error, "the working set cannot be kept"),
                }
            }
            Plan::Nothing => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Mutex;

    use super::*;
    use crate::source::{PAGE_BYTES, SourceError};

    #[derive(Debug, Default)]
    struct Memory(Mutex<Vec<Range<u64>>>);

    impl Populate for Memory {
        fn populate(&self, range: Range<u64>) -> Result<(), SourceError> {
            self.0.lock().unwrap().push(range);
            Ok(())
        }

        fn faults_wait(&self) -> bool {
            false
        }
    }

    /// Reads by a thread of the runtime for that, as files and chunks do.
    #[derive(Debug)]
    struct ReadByThreads(tokio::runtime::Handle);

    impl Populate for ReadByThreads {
        fn populate(&self, _range: Range<u64>) -> Result<(), SourceError> {
            self.0.block_on(crate::source::blocking("read", || ()))
        }

        fn faults_wait(&self) -> bool {
            false
        }
    }

    #[test]
    fn a_replay_has_no_thread_that_its_reads_need() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().max_blocking_threads(1).enable_time().build().unwrap();
        let memory = Arc::new(ReadByThreads(runtime.handle().clone()));
        let set = WorkingSet {
            identity: Identity::from_bytes([3; 32]),
            size_bytes: 1 << 20,
            around_bytes: PAGE_BYTES,
            pages: vec![7],
        };
        let progress = Arc::new(Progress::default());
        let run = Plan::Replay(set).run(PathBuf::new(), memory, 1, Arc::clone(&progress), std::future::pending());
        let ran = runtime.block_on(async { tokio::time::timeout(Duration::from_secs(20), run).await });
        runtime.shutdown_background();
        ran.expect("the replay waits for a read that waits for the replay");
        assert_eq!(progress.done(), PAGE_BYTES);
    }

    #[tokio::test]
    async fn a_set_is_recorded_once_and_then_replayed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("memory.working-set");
        let identity = Identity::from_bytes([3; 32]);
        let plan = |identity| {
            Plan::new(&file, identity, || Recorder::new(identity, 1 << 20, PAGE_BYTES, 1 << 20).map(Arc::new))
        };
        let memory = Arc::new(Memory::default());
        // A machine that touches nothing leaves nothing.
        plan(identity).run(file.clone(), Arc::clone(&memory) as _, 1, Arc::default(), async {}).await;
        assert!(!file.exists());

        let first = plan(identity);
        first.observer().unwrap().faulted(8192);
        first.run(file.clone(), Arc::clone(&memory) as _, 1, Arc::default(), async {}).await;
        assert!(memory.0.lock().unwrap().is_empty());

        let second = plan(identity);
        assert!(second.observer().is_none());
        let progress = Arc::new(Progress::default());
        let never = std::future::pending();
        second.run(file.clone(), Arc::clone(&memory) as _, 1, Arc::clone(&progress), never).await;
        assert_eq!(memory.0.lock().unwrap().as_slice(), std::slice::from_ref(&(8192..12288)));
        assert_eq!(progress.done(), 4096);

        // Another snapshot, and a file that is none.
        assert!(matches!(plan(Identity::from_bytes([4; 32])), Plan::Record(_)));
        std::fs::write(&file, "none").unwrap();
        assert!(matches!(plan(identity), Plan::Record(_)));
    }
}
